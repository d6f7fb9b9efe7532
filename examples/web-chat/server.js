// Models that the server of this page answers for, by the API beside it. To the page they are models as those of the tab.
import { Sterna } from './sterna.js'

/**
 * @typedef {import('../../packages/sterna/dist/index.js').Model} Model
 * @typedef {import('../../packages/sterna/dist/index.js').Chat} Chat
 * @typedef {import('../../packages/sterna/dist/index.js').Generation} Generation
 * @typedef {import('../../packages/sterna/dist/index.js').ChatCompletionRequest['messages']} Messages
 * @typedef {{ id: string, max_model_len?: number }} Served
 */

/** Those of this server: none where it has no API, or asks for a key. @type {Promise<Served[]>} */
export const served = fetch('/v1/models')
  .then(async response => response.ok ? (await response.json()).data : [])
  .catch(() => [])

/** The model that the server calls `id`. @param {Served} served @returns {Model} */
export function serverModel({ id, max_model_len: contextLength = 0 }) {
  const { create } = Sterna.openai(location.origin).chat.completions
  const model = {
    info: { name: id, hasTemplate: true, backend: 'server', contextLength, maxContext: contextLength, warnings: [] },
    /** @param {{ messages?: Messages, options?: { temperature?: number, topP?: number } }} [of] */
    chat({ messages: before = [], options: { temperature, topP } = {} } = {}) {
      const messages = [...before]
      const say = () => new Answer(signal => create({
        model: id, messages, stream: true, stream_options: { include_usage: true }, temperature: temperature ?? null, top_p: topP ?? null,
      }, { signal }), text => messages.push({ role: 'assistant', content: text }))
      return {
        /** @param {string} content */
        send(content) {
          messages.push({ role: 'user', content })
          return say()
        },
        regenerate() {
          messages.length = messages.findLastIndex(({ role }) => role === 'user') + 1
          return say()
        },
        /** @param {number} index @param {string} content */
        edit(index, content) {
          messages.length = index
          messages.push({ role: 'user', content })
          return say()
        },
        async close() {},
      }
    },
    async dispose() {},
  }
  return /** @type {Model} */ (/** @type {unknown} */ (model))
}

/** An answer as it comes. */
class Answer {
  /** @type {'stop' | 'length' | 'stopped' | undefined} */
  reason
  /** @type {{ completionTokens: number } | undefined} */
  usage
  forgotten = 0
  #abort = new AbortController()
  #ask
  #ended

  /**
   * @param {(signal: AbortSignal) => Promise<AsyncIterable<import('../../packages/sterna/dist/index.js').ChatCompletionChunk>>} ask
   * @param {(text: string) => void} ended
   */
  constructor(ask, ended) {
    this.#ask = ask
    this.#ended = ended
  }

  stop() {
    this.reason ??= 'stopped'
    this.#abort.abort()
  }

  async *[Symbol.asyncIterator]() {
    let text = ''
    try {
      for await (const { choices: [choice], usage } of await this.#ask(this.#abort.signal)) {
        const piece = choice?.delta.content
        if (piece) {
          text += piece
          yield piece
        }
        if (choice?.finish_reason) this.reason ??= choice.finish_reason === 'length' ? 'length' : 'stop'
        if (usage) this.usage = { completionTokens: usage.completion_tokens }
      }
    } catch (error) {
      if (this.reason !== 'stopped') throw error
    } finally {
      if (text) this.#ended(text)
    }
  }
}

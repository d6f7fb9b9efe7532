// Models that the server of this page answers for, by the API beside it. To the page they are models as those of the tab.

/**
 * @typedef {import('../../packages/sterna/dist/index.js').Model} Model
 * @typedef {{ role: string, content: string }} Message
 * @typedef {{ id: string, max_model_len?: number }} Served
 * @typedef {{ choices?: { delta: { content?: string | null, reasoning?: string | null, reasoning_content?: string | null }, finish_reason?: string | null }[], usage?: { completion_tokens: number } | null, error?: { message?: string } }} Chunk
 */

const KEY = 'sterna-chat.key'

/** What the server refused, for people. */
export class ServerError extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message)
    this.name = 'ServerError'
    this.status = status
  }
}

/** @type {string | undefined} where the tab has no storage, until it is closed */
let keyInMemory

/** Storage of the tab, then of the browser; none where the browser blocks it. @type {(() => Storage)[]} */
const STORES = [() => sessionStorage, () => localStorage]

/** The key that is sent, if there is one. */
function key() {
  for (const store of STORES) {
    try {
      const found = store().getItem(KEY)
      if (found) return found
    } catch {
      // Storage is blocked.
    }
  }
  return keyInMemory
}

/** Keeps `text` in this tab; in this browser if it is to be remembered. @param {string} text @param {boolean} remembered */
function keep(text, remembered) {
  forget()
  keyInMemory = text
  try {
    ;(remembered ? localStorage : sessionStorage).setItem(KEY, text)
  } catch {
    // Storage is blocked: until the page is closed.
  }
}

/** Forgets the key. */
export function forget() {
  keyInMemory = undefined
  for (const store of STORES) {
    try {
      store().removeItem(KEY)
    } catch {
      // Storage is blocked, so there is none in it.
    }
  }
}

export const hasKey = () => key() !== undefined

/** @param {string} path @param {RequestInit} [init] @param {string} [as] the key */
async function ask(path, init = {}, as = key()) {
  const headers = { 'Content-Type': 'application/json', ...(as ? { Authorization: `Bearer ${as}` } : {}) }
  let response
  try {
    response = await fetch(path, { ...init, headers, cache: 'no-store', credentials: 'omit' })
  } catch (error) {
    if (/** @type {Error} */ (error).name === 'AbortError') throw error
    throw new ServerError(0, 'The server can’t be reached.')
  }
  if (!response.ok) throw await refusal(response)
  return response
}

/** @param {Response} response */
async function refusal(response) {
  const said = await response.json().then(({ error }) => String(error?.message ?? ''), () => '')
  const wait = Number(response.headers.get('retry-after')) || undefined
  const { status } = response
  if (status === 401) return new ServerError(status, hasKey() ? 'The server doesn’t take this key.' : 'The server asks for a key.')
  if (status === 403) return new ServerError(status, `The key may not do this: ${said}`)
  if (status !== 429) return new ServerError(status, said ? `The server says: ${said}` : `The server answered with HTTP ${status}.`)
  const again = wait ? ` It takes requests again in ${wait} ${wait === 1 ? 'second' : 'seconds'}.` : ''
  return new ServerError(status, `${said ? `The server says: ${said}.` : 'The server takes no more requests now.'}${again}`)
}

/**
 * What the server has: its models; whether it asks for a key; neither where it has no API.
 * @returns {Promise<{ models: Served[], wantsKey: boolean, error?: ServerError }>}
 */
async function look() {
  try {
    const response = await ask('/v1/models')
    const { data } = await response.json()
    return { models: Array.isArray(data) ? data : [], wantsKey: false }
  } catch (thrown) {
    const error = thrown instanceof ServerError ? thrown : undefined
    const wantsKey = error?.status === 401
    // A key that was kept may be one no more. What isn't there, and who isn't reached, has no API.
    const isNews = error && (wantsKey ? hasKey() : error.status === 429 || error.status >= 500)
    return { models: [], wantsKey, ...(isNews ? { error } : {}) }
  }
}

let looking = look()

/** What the server has, as it was said last. */
export const served = () => looking

/** Asks again. */
export const lookAgain = () => looking = look()

/**
 * Tries `text` as a key, and keeps it if the server takes it.
 * @param {string} text @param {boolean} remembered in this browser, not in this tab alone
 * @returns {Promise<Served[]>} Throws a {@link ServerError}.
 */
export async function useKey(text, remembered) {
  if (!/^[\x21-\x7e]+$/.test(text)) throw new ServerError(401, 'A key has letters, digits and signs, and no spaces.')
  try {
    await ask('/v1/models', {}, text)
  } catch (error) {
    if (error instanceof ServerError && error.status === 401) throw new ServerError(401, 'The server doesn’t take this key.')
    throw error
  }
  keep(text, remembered)
  return (await lookAgain()).models
}

/** The events of a stream, as JSON. @param {Response} response @returns {AsyncGenerator<Chunk>} */
async function* events(response) {
  const { body } = response
  if (!body) return
  const reader = body.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ''
  try {
    for (;;) {
      const { done, value } = await reader.read()
      if (done) throw new ServerError(0, 'The connection to the server broke off.')
      const lines = (rest + value).split('\n')
      rest = lines.pop() ?? ''
      for (const line of lines) {
        if (!line.startsWith('data:')) continue
        const data = line.slice(5).trim()
        if (data === '[DONE]') return
        yield JSON.parse(data)
      }
    }
  } finally {
    await reader.cancel().catch(() => {})
  }
}

/** The model that the server calls `id`. @param {Served} served @returns {Model} */
export function serverModel({ id, max_model_len: contextLength = 0 }) {
  const model = {
    info: { name: id, hasTemplate: true, backend: 'server', contextLength, maxContext: contextLength, warnings: [] },
    /** @param {{ messages?: Message[], options?: { temperature?: number, topP?: number } }} [of] */
    chat({ messages: before = [], options: { temperature, topP } = {} } = {}) {
      const messages = [...before]
      const say = () => {
        // As they are now: what is said later isn't asked.
        const body = JSON.stringify({ model: id, messages, stream: true, stream_options: { include_usage: true }, temperature, top_p: topP })
        return new Answer(signal => ask('/v1/chat/completions', { method: 'POST', body, signal }), text => messages.push({ role: 'assistant', content: text }))
      }
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
  /** What was thought before the answer, so far. */
  reasoning = ''
  #abort = new AbortController()
  #ask
  #ended

  /**
   * @param {(signal: AbortSignal) => Promise<Response>} ask
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

  /** Pieces of the text; empty ones where `reasoning` has grown. */
  async *[Symbol.asyncIterator]() {
    let text = ''
    try {
      for await (const { choices: [choice] = [], usage, error } of events(await this.#ask(this.#abort.signal))) {
        if (error) throw new ServerError(0, `The server says: ${error.message}`)
        const thought = choice?.delta.reasoning ?? choice?.delta.reasoning_content
        if (thought) {
          this.reasoning += thought
          yield ''
        }
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

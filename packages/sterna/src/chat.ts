import { SternaError } from './error.js'
import { Generation } from './generation.js'
import type { AdapterUse, GenerateOptions, Message } from './types.js'

export interface ChatOptions {
  /** Instructions for the model. */
  system?: string
  /** What was said before. */
  messages?: Message[]
  contextLength?: number
  adapters?: AdapterUse[]
  /** Leave out the oldest turns when the context is full, as default; else the answer fails with `context_full`. */
  forget?: boolean
  /** Of every answer, unless it is given its own. */
  options?: Omit<GenerateOptions, 'signal' | 'adapters'>
}

/** What a chat needs of its model. @internal */
export interface ChatBackend {
  open(contextLength?: number): Promise<number>
  close(session: number): Promise<void>
  answer(session: Promise<number>, messages: Message[], forget: boolean, options: GenerateOptions): Generation
}

/**
 * A conversation. What was computed of it stays in a cache, so that an answer computes what is new.
 *
 * One answer at a time: `send` while another is running throws `invalid_request`. A stopped, aborted or
 * failed answer leaves what it had said, if anything, as the assistant's message.
 */
export class Chat {
  #messages: Message[]
  #session: Promise<number> | undefined
  #running: Generation | undefined
  #closed = false

  /** @internal */
  constructor(private readonly backend: ChatBackend, private readonly options: ChatOptions) {
    this.#messages = [...(options.system ? [{ role: 'system', content: options.system } as const] : []), ...(options.messages ?? [])]
  }

  /** What was said, the instructions first. A copy. */
  get messages(): Message[] { return this.#messages.map(message => ({ ...message })) }

  /** Says something and gives the answer. */
  send(content: string | Message, options: GenerateOptions = {}): Generation {
    this.#refuseIfBusy()
    this.#messages.push(typeof content === 'string' ? { role: 'user', content } : content)
    return this.#answer(options)
  }

  /** Answers the last question anew. */
  regenerate(options: GenerateOptions = {}): Generation {
    this.#refuseIfBusy()
    const last = this.#messages.findLastIndex(({ role }) => role === 'user' || role === 'tool')
    if (last < 0) throw new SternaError('invalid_request', 'There is no question to answer.')
    this.#messages.length = last + 1
    return this.#answer(options)
  }

  /** Replaces the message at `index` of `messages`, drops what came after it, and answers if it was a question. */
  edit(index: number, content: string, options: GenerateOptions = {}): Generation {
    this.#refuseIfBusy()
    const message = this.#messages[index]
    if (message?.role !== 'user') throw new SternaError('invalid_request', `Message ${index} is no question.`)
    this.#messages.length = index
    this.#messages.push({ ...message, content })
    return this.#answer(options)
  }

  /** Forgets what was said, but for the instructions. */
  reset(): void {
    this.#refuseIfBusy()
    this.#messages = this.#messages.filter(({ role }, i) => i === 0 && role === 'system')
  }

  /** Frees the cache. The chat can't be used afterwards. */
  async close(): Promise<void> {
    if (this.#closed) return
    this.#closed = true
    this.#running?.stop()
    if (this.#session) await this.backend.close(await this.#session)
  }

  #refuseIfBusy(): void {
    if (this.#closed) throw new SternaError('disposed', 'The chat was closed.')
    if (this.#running) throw new SternaError('invalid_request', 'The chat is still answering; stop the answer or wait for it.')
  }

  #answer(options: GenerateOptions): Generation {
    this.#session ??= this.backend.open(this.options.contextLength)
    // Another try opens another.
    this.#session.catch(() => { this.#session = undefined })
    const adapters = options.adapters ?? this.options.adapters
    const generation = this.backend.answer(this.#session, this.messages, this.options.forget ?? true, {
      ...this.options.options, ...options, ...(adapters ? { adapters } : {}),
    })
    this.#running = generation
    const messages = this.#messages
    generation.onEnd = () => {
      this.#running = undefined
      if (generation.partial !== '') messages.push({ role: 'assistant', content: generation.partial })
    }
    return generation
  }
}

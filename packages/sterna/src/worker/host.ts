/** One loaded model: its sessions, and the loop that computes all running answers together. */
import type { Constraint, Vocabulary } from '../constraint.js'
import type { EngineEvent, Model } from '../engine.js'
import { SternaError, cancelled } from '../error.js'
import type { AdapterUse, Message, ModelInfo, Notice, ReceiptCheck, Usage, WireEnd, WireEvent, WireGenerate, WireGrammar } from '../types.js'
import type { Engine } from './engine.js'
import type { Opened } from './library.js'

/** An answer in progress. */
interface Answer {
  emit(event: WireEvent): void
  end(end: Omit<WireEnd, 'forgotten'>): void
  fail(error: SternaError): void
}

/** Largest context that is taken without being asked for: the cache of more would surprise. */
const DEFAULT_CONTEXT = 4096

export class Host {
  #answers = new Map<number, Answer>()
  /** The last answer of each session, which the next waits for. */
  #turns = new Map<number, Promise<unknown>>()
  /** Adapters that each session has. */
  #adapters = new Map<number, string>()
  #defaultAdapters: AdapterUse[] = []
  /** A session for calls that name none, kept for the prefix that it holds. */
  #spare: number | undefined
  /** The engine does one thing at a time; this is the end of its queue. */
  #queue: Promise<unknown> = Promise.resolve()
  #stepping = false
  /** The model's tokens, once a schema has been asked for. */
  #vocabulary: Promise<Vocabulary> | undefined
  readonly #running = new Set<Promise<unknown>>()
  #swapping: Promise<void> | undefined
  readonly contextLength: number
  /** Files that adapters and swapped groups may still read. */
  readonly opened: Opened[]

  constructor(private readonly model: Model, private readonly name: string, private readonly engine: Pick<Engine, 'threads' | 'constraints'>, contextLength: number | undefined, opened: Opened) {
    this.contextLength = contextLength ?? Math.min(DEFAULT_CONTEXT, model.info().maxContext)
    this.opened = [opened]
  }

  /** Runs `use` when the engine is free. A step of the running answers may come before it, never at the same time. */
  with<T>(use: (model: Model) => T | Promise<T>): Promise<T> {
    const result = this.#queue.then(() => use(this.model))
    this.#queue = result.catch(() => {})
    return result
  }

  info(): Promise<ModelInfo> {
    return this.with(model => ({ ...model.info(), name: this.name, threads: this.engine.threads, contextLength: this.contextLength }))
  }

  open(contextLength?: number): Promise<number> {
    return this.with(model => model.session(contextLength ?? this.contextLength))
  }

  close(session: number): Promise<void> {
    this.#answers.get(session)?.fail(new SternaError('disposed', 'The chat was closed.'))
    this.#adapters.delete(session)
    this.#turns.delete(session)
    return this.with(model => model.close(session))
  }

  /** Runs `use`, which drops what sessions hold, when no answer is running; answers that are asked for meanwhile wait. */
  async swap<T>(use: (model: Model) => Promise<T>): Promise<T> {
    while (this.#swapping) await this.#swapping
    const swapped = Promise.allSettled(this.#running).then(() => this.with(use))
    const over = this.#swapping = swapped.then(() => {}, () => {}).then(() => { if (this.#swapping === over) this.#swapping = undefined })
    return swapped
  }

  /** Computes the answer of a receipt again, with the files that the model was loaded from. */
  async check(receipt: string, adapters: AdapterUse[]): Promise<ReceiptCheck> {
    const [opened] = this.opened
    await opened!.arrived
    return this.with(model => model.check(receipt, opened!.files, adapters))
  }

  useAdapters(adapters: AdapterUse[]): void { this.#defaultAdapters = adapters }

  /** Token ids of a text, or of messages by the chat template. */
  encode(model: Model, prompt: string | Message[], tools?: unknown[]): Uint32Array {
    if (typeof prompt === 'string') return model.encode(prompt)
    // A model without a template continues a text, so a chat with it is one.
    if (!model.info().hasTemplate) return model.encode(prompt.map(({ content }) => content).join(''))
    return model.prompt(prompt, { addGenerationPrompt: true, ...(tools ? { tools } : {}) })
  }

  /** Answers, after what the session is answering. Rejects with `cancelled` when `signal` aborts; what it holds stays. */
  async generate(args: WireGenerate, signal: AbortSignal, emit: (event: WireEvent) => void): Promise<WireEnd> {
    const { session } = args
    if (session !== undefined) {
      const turn = (this.#turns.get(session) ?? Promise.resolve()).then(() => this.#answer(session, args, signal, emit))
      this.#turns.set(session, turn.catch(() => {}))
      return turn
    }
    const own = this.#spare ?? await this.open()
    this.#spare = undefined
    try {
      return await this.#answer(own, args, signal, emit)
    } finally {
      if (this.#spare === undefined) this.#spare = own
      else await this.close(own)
    }
  }

  async #answer(id: number, args: WireGenerate, signal: AbortSignal, emit: (event: WireEvent) => void): Promise<WireEnd> {
    while (this.#swapping) await this.#swapping
    const answer = this.#compute(id, args, signal, emit)
    this.#running.add(answer)
    try {
      return await answer
    } finally {
      this.#running.delete(answer)
    }
  }

  async #compute(id: number, { prompt, forget, options, grammar, tools, adapters }: WireGenerate, signal: AbortSignal, emit: (event: WireEvent) => void): Promise<WireEnd> {
    const ended = new Promise<Omit<WireEnd, 'forgotten'>>((end, fail) => {
      this.#answers.set(id, { emit, end, fail })
      signal.addEventListener('abort', () => fail(cancelled(signal)))
    })
    ended.catch(() => {})
    let started = false
    let constraint: Constraint | undefined
    try {
      constraint = grammar && await this.#constraint(grammar)
      const forgotten = await this.with(model => {
        if (signal.aborted) throw cancelled(signal)
        this.#applyAdapters(model, id, adapters ?? this.#defaultAdapters)
        const { ids, forgotten } = this.#fitting(model, prompt, forget, options.maxTokens, tools)
        model.start(id, ids, options, constraint)
        started = true
        return forgotten
      })
      void this.#run()
      return { ...await ended, forgotten }
    } catch (error) {
      if (started) await this.with(model => model.cancel(id))
      throw error
    } finally {
      this.#answers.delete(id)
      release(constraint)
    }
  }

  async #constraint({ kind, text }: WireGrammar): Promise<Constraint> {
    this.#vocabulary ??= this.engine.constraints().then(({ Vocabulary }) => this.with(model => new Vocabulary(...model.vocabulary())))
    this.#vocabulary.catch(() => { this.#vocabulary = undefined })
    const vocabulary = await this.#vocabulary
    try {
      return vocabulary.constraint(kind, text)
    } catch (error) {
      // What has no code is a trap or a stack that overflowed.
      throw error instanceof Error && 'code' in error ? error : new SternaError('invalid_request', 'schema: it takes more memory or more levels than there are.', { cause: error })
    }
  }

  /** The prompt's ids. With `forget` the oldest turns are left out until the answer has room: a quarter of the context, or `maxTokens`. */
  #fitting(model: Model, prompt: string | Message[], forget: boolean, maxTokens = Infinity, tools?: unknown[]): { ids: Uint32Array; forgotten: number } {
    const most = this.contextLength - Math.min(maxTokens, this.contextLength >> 2)
    let ids = this.encode(model, prompt, tools)
    let forgotten = 0
    for (let messages = prompt; forget && typeof messages !== 'string' && ids.length > most;) {
      const shorter = withoutOldestTurn(messages)
      if (!shorter) break
      forgotten += messages.length - shorter.length
      messages = shorter
      ids = this.encode(model, messages, tools)
    }
    return { ids, forgotten }
  }

  #applyAdapters(model: Model, session: number, adapters: AdapterUse[]): void {
    const wanted = JSON.stringify(adapters)
    if ((this.#adapters.get(session) ?? '[]') === wanted) return
    model.useAdapters(session, adapters)
    this.#adapters.set(session, wanted)
  }

  /** Steps until no answer runs. Between two steps the Worker hears its messages. */
  async #run(): Promise<void> {
    if (this.#stepping) return
    this.#stepping = true
    try {
      while (await this.with(async model => {
        if (model.isIdle()) return false
        const events = await model.step()
        for (const event of events) this.#dispatch(event)
        if (events.some(({ type }) => type === 'device_lost')) await model.recover(this.opened[0]!.files, () => {})
        return true
      })) await breathe()
    } catch (error) {
      const failure = SternaError.from(error, 'compute')
      for (const answer of this.#answers.values()) answer.fail(failure)
    } finally {
      this.#stepping = false
    }
    // An answer may have begun after the last look and before the flag fell.
    if (!await this.with(model => model.isIdle()).catch(() => true)) void this.#run()
  }

  #dispatch(event: EngineEvent): void {
    const answer = this.#answers.get(event.session)
    if (!answer) return // It was cancelled.
    switch (event.type) {
      case 'token': {
        const { id, text, logprob, top = [] } = event
        if (logprob !== undefined) answer.emit({ text, logprob: { id, text, logprob, top } })
        else if (text !== '') answer.emit({ text })
        break
      }
      case 'end': {
        const { promptTokens, cachedTokens, completionTokens, reason } = event
        const usage: Usage = { promptTokens, cachedTokens, completionTokens }
        if (event.text !== '') answer.emit({ text: event.text })
        answer.end({ reason, usage })
        break
      }
      case 'failed':
        answer.fail(SternaError.from(event, 'compute'))
        break
      case 'device_lost': {
        const notice: Notice = { code: 'device_lost', message: event.message }
        answer.emit({ notice })
      }
    }
  }

  async dispose(): Promise<void> {
    for (const answer of this.#answers.values()) answer.fail(new SternaError('disposed', 'The model was disposed.'))
    await this.with(model => model.free())
    for (const opened of this.opened) opened.close()
  }
}

/** Frees a constraint; a module that has trapped frees no more. */
function release(constraint: Constraint | undefined): void {
  try { constraint?.free() } catch { /* Its memory is gone with it. */ }
}

/** Without the first question and all up to the next; `undefined` if there is only one. */
function withoutOldestTurn(messages: Message[]): Message[] | undefined {
  const first = messages.findIndex(({ role }) => role !== 'system')
  const next = messages.findIndex(({ role }, i) => i > first && role === 'user')
  return first < 0 || next < 0 ? undefined : [...messages.slice(0, first), ...messages.slice(next)]
}

const pause = new MessageChannel()
const resumed: (() => void)[] = []
pause.port1.onmessage = () => resumed.shift()!()
;(pause.port1 as { unref?(): void }).unref?.() // In Node.js.

/** Lets waiting messages be handled; unlike a timer without a delay of milliseconds. */
function breathe(): Promise<void> {
  return new Promise(resolve => {
    resumed.push(resolve)
    pause.port2.postMessage(null)
  })
}

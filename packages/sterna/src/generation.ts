import { SternaError } from './error.js'
import type { FinishReason, Notice, TokenLogprob, Usage, WireEnd, WireEvent } from './types.js'

/**
 * An answer that is being computed: `for await (const piece of generation)` gives its text in pieces.
 *
 * It begins at once and goes on whether or not it is read. Leaving the loop early stops it.
 * Iterating or `text()` rejects with a `SternaError`: `cancelled` if its signal aborted.
 */
export class Generation implements AsyncIterable<string> {
  /** Of the answer's tokens, if `logprobs` was asked for. */
  readonly logprobs: TokenLogprob[] = []
  /** Known when the answer has ended by itself. */
  usage: Usage | undefined
  /** Why it ended. */
  reason: FinishReason | undefined
  /** Messages that the Worker left out because the context was full. */
  forgotten = 0

  /** @internal Called once, before anyone hears of the end. */
  onEnd: (() => void) | undefined

  #pieces: string[] = []
  #ended = false
  #error: SternaError | undefined
  #wake: (() => void)[] = []
  #abort = new AbortController()

  /** @internal `run` makes the call to the Worker. */
  constructor(
    run: (signal: AbortSignal, onEvent: (event: WireEvent) => void) => Promise<WireEnd>,
    signal: AbortSignal | undefined, onNotice: (notice: Notice) => void = () => {},
  ) {
    const abort = () => this.#abort.abort(signal!.reason)
    if (signal?.aborted) abort()
    else signal?.addEventListener('abort', abort, { once: true })
    run(this.#abort.signal, event => {
      if ('notice' in event) return onNotice(event.notice)
      if (this.#ended) return
      if (event.logprob) this.logprobs.push(event.logprob)
      if (event.text !== '') this.#pieces.push(event.text)
      this.#notify()
    }).then(end => this.#end(() => Object.assign(this, end)), error => this.#end(() => { this.#error = SternaError.from(error) }))
      .finally(() => signal?.removeEventListener('abort', abort))
  }

  #end(how: () => void): void {
    if (this.#ended) return
    how()
    this.#ended = true
    this.onEnd?.()
    this.#notify()
  }

  /** Ends the answer where it is, without an error. Its usage is not known then. */
  stop(): void {
    this.#end(() => { this.reason = 'stopped' })
    this.#abort.abort()
  }

  /** The whole text, when the answer has ended. */
  async text(): Promise<string> {
    while (!this.#ended) await this.#more()
    if (this.#error) throw this.#error
    return this.#pieces.join('')
  }

  /** What there is of the text so far. */
  get partial(): string { return this.#pieces.join('') }

  async *[Symbol.asyncIterator](): AsyncGenerator<string, void, undefined> {
    try {
      for (let at = 0; ;) {
        while (at < this.#pieces.length) yield this.#pieces[at++]!
        if (this.#ended) break
        await this.#more()
      }
      if (this.#error) throw this.#error
    } finally {
      this.stop()
    }
  }

  #more(): Promise<void> { return new Promise(resolve => this.#wake.push(resolve)) }
  #notify(): void { for (const wake of this.#wake.splice(0)) wake() }
}

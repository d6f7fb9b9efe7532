/**
 * Calls from the page to the Worker, over one port.
 *
 * A call has one answer (a value or an error) and any number of items before it. An aborted `AbortSignal`
 * on the page aborts the handler's signal in the Worker, and rejects at once with code `cancelled`.
 */
import { SternaError, cancelled, type ErrorCode } from './error.js'

/** What a Worker can be asked: for each method its arguments, its items and its value. */
export type Methods = Record<string, { args: unknown; item?: unknown; value: unknown }>

type Call = { id: number; method: string; args: unknown }
type Cancel = { id: number; cancel: true }
type Reply =
  | { id: number; item: unknown }
  | { id: number; value: unknown }
  | { id: number; error: { code: ErrorCode; message: string } }

/** A `MessagePort`, a `Worker`, or the Worker's own scope. */
export interface Port {
  postMessage(message: unknown, transfer?: Transferable[]): void
  addEventListener(type: 'message', listener: (event: MessageEvent) => void): void
  start?(): void
}

export interface CallOptions<Item> {
  signal?: AbortSignal | undefined
  onItem?: ((item: Item) => void) | undefined
  transfer?: Transferable[]
}

/** The page's end. */
export class Remote<M extends Methods> {
  #port: Port
  #next = 1
  #calls = new Map<number, { onItem: ((item: never) => void) | undefined; resolve: (value: never) => void; reject: (error: SternaError) => void }>()
  #failure: SternaError | undefined

  constructor(port: Port) {
    this.#port = port
    port.addEventListener('message', event => this.#receive(event.data as Reply))
    port.start?.()
  }

  call<K extends keyof M & string>(method: K, args: M[K]['args'], options: CallOptions<M[K]['item']> = {}): Promise<M[K]['value']> {
    const { signal, onItem, transfer = [] } = options
    if (this.#failure) return Promise.reject(this.#failure)
    if (signal?.aborted) return Promise.reject(cancelled(signal))
    const id = this.#next++
    return new Promise<M[K]['value']>((resolve, reject) => {
      const abort = () => {
        this.#port.postMessage({ id, cancel: true } satisfies Cancel)
        this.#calls.delete(id)
        reject(cancelled(signal))
      }
      const settled = () => signal?.removeEventListener('abort', abort)
      signal?.addEventListener('abort', abort, { once: true })
      this.#calls.set(id, {
        onItem,
        resolve: value => (settled(), resolve(value)),
        reject: error => (settled(), reject(error)),
      })
      try {
        this.#port.postMessage({ id, method, args } satisfies Call, transfer)
      } catch (error) { // An argument that can't be cloned.
        this.#calls.delete(id)
        settled()
        reject(SternaError.from(error, 'invalid_request'))
      }
    })
  }

  /** Rejects all calls, now and later. */
  fail(error: SternaError): void {
    this.#failure ??= error
    const calls = [...this.#calls.values()]
    this.#calls.clear()
    for (const call of calls) call.reject(error)
  }

  #receive(reply: Reply): void {
    const call = this.#calls.get(reply.id)
    if (!call) return // It was cancelled.
    if ('item' in reply) return call.onItem?.(reply.item as never)
    this.#calls.delete(reply.id)
    if ('error' in reply) call.reject(new SternaError(reply.error.code, reply.error.message))
    else call.resolve(reply.value as never)
  }
}

/** What a handler gets besides its arguments. */
export interface Context<Item> {
  signal: AbortSignal
  emit(item: Item): void
}

export type Handlers<M extends Methods> = {
  [K in keyof M]: (args: M[K]['args'], context: Context<M[K]['item']>) => M[K]['value'] | Promise<M[K]['value']>
}

/** What of a value is transferred, not copied. */
const buffers = (value: unknown) => ArrayBuffer.isView(value) ? [value.buffer as ArrayBuffer] : []

/** The Worker's end. Values and items that are arrays of numbers are transferred, not copied. */
export function serve<M extends Methods>(port: Port, handlers: Handlers<M>): void {
  const running = new Map<number, AbortController>()
  port.addEventListener('message', event => {
    const message = event.data as Call | Cancel
    if ('cancel' in message) running.get(message.id)?.abort()
    else void answer(message)
  })
  port.start?.()

  async function answer({ id, method, args }: Call): Promise<void> {
    const controller = new AbortController()
    running.set(id, controller)
    const { signal } = controller
    try {
      const handler = handlers[method]
      if (!handler) throw new SternaError('invalid_request', `There is no call \`${method}\`.`)
      const emit = (item: unknown) => { if (!signal.aborted) port.postMessage({ id, item }, buffers(item)) }
      const value: unknown = await handler(args as never, { signal, emit })
      port.postMessage({ id, value }, buffers(value))
    } catch (error) {
      const { code, message } = SternaError.from(error)
      port.postMessage({ id, error: { code, message } })
    } finally {
      running.delete(id)
    }
  }
}

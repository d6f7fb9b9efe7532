/**
 * The codes of `SternaError`. They are the same in every version.
 *
 * The first group comes from the engine, as in the native library; the second is the browser's.
 */
export type ErrorCode =
  | 'not_found' | 'io' | 'invalid_file' | 'unsupported' | 'invalid_request' | 'hash_mismatch' | 'untrusted'
  | 'context_full' | 'device_lost' | 'compute' | 'out_of_memory'
  /** The browser's storage has no room for the model; nothing was fetched. */
  | 'quota'
  /** The model can't fit into the memory that a tab may use. */
  | 'too_large'
  /** Stopped by an `AbortSignal`; `name` is `AbortError`. */
  | 'cancelled'
  /** Another tab or another model uses what should be removed or replaced. */
  | 'busy'
  /** The model was disposed. */
  | 'disposed'
  /** The Worker could not start, or ended. */
  | 'worker_failed'
  /** A server answered a `chat.completions` call with an error; `status` is its HTTP status. */
  | 'server'

/** Why something failed: `code` for programs, `message` for people. */
export class SternaError extends Error {
  readonly code: ErrorCode
  /** HTTP status, with code `server`. */
  readonly status?: number

  constructor(code: ErrorCode, message: string, options: { cause?: unknown; status?: number } = {}) {
    super(message, 'cause' in options ? { cause: options.cause } : undefined)
    this.name = code === 'cancelled' ? 'AbortError' : 'SternaError'
    this.code = code
    if (options.status !== undefined) this.status = options.status
  }

  /** Any thrown value as a `SternaError`; the engine's codes and a browser's full storage are recognised. */
  static from(error: unknown, fallback: ErrorCode = 'io'): SternaError {
    if (error instanceof SternaError) return error
    const { name, code, message } = (error ?? {}) as { name?: unknown; code?: unknown; message?: unknown }
    const text = typeof message === 'string' && message !== '' ? message : String(error)
    if (name === 'QuotaExceededError') {
      return new SternaError('quota', `The browser's storage is full: ${text}`, { cause: error })
    }
    if (name === 'AbortError') return new SternaError('cancelled', text, { cause: error })
    if (error instanceof RangeError && /memory|allocation/i.test(text)) {
      return new SternaError('out_of_memory', text, { cause: error })
    }
    // A DOMException's code is a number.
    return new SternaError(typeof code === 'string' ? (code as ErrorCode) : fallback, text, { cause: error })
  }
}

/** The error of an aborted call. */
export function cancelled(signal?: AbortSignal): SternaError {
  return new SternaError('cancelled', 'Cancelled.', { cause: signal?.reason })
}

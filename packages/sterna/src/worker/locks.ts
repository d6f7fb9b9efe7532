/** Locks between the tabs of an origin, and word of what another tab is doing. */

/** Taken; the call gives it back. */
export type Release = () => void

export interface LockOptions {
  mode?: 'shared' | 'exclusive'
  signal?: AbortSignal
}

/** Whether tabs can agree at all: secure contexts only. */
export const haveLocks = () => typeof navigator !== 'undefined' && navigator.locks !== undefined

/** Takes the lock `name`, waiting for it. A tab that ends gives back what it holds. */
export async function lock(name: string, { mode = 'exclusive', signal }: LockOptions = {}): Promise<Release> {
  return (await request(name, signal ? { mode, signal } : { mode }))!
}

/** Takes the lock `name` if it is free. */
export function tryLock(name: string, mode: 'shared' | 'exclusive' = 'exclusive'): Promise<Release | undefined> {
  return request(name, { mode, ifAvailable: true })
}

function request(name: string, options: { mode: 'shared' | 'exclusive'; signal?: AbortSignal; ifAvailable?: boolean }): Promise<Release | undefined> {
  if (!haveLocks()) return Promise.resolve(() => {})
  return new Promise((resolve, reject) => {
    navigator.locks.request(name, options, granted => {
      if (!granted) return resolve(undefined)
      return new Promise<void>(release => resolve(release))
    }).catch(reject)
  })
}

/** Hears what others say on `name` until closed, and says something to them. */
export function channel<T>(name: string, heard?: (message: T) => void): { say(message: T): void; close(): void } {
  if (typeof BroadcastChannel === 'undefined') return { say: () => {}, close: () => {} }
  const opened = new BroadcastChannel(name)
  if (heard) opened.onmessage = event => heard(event.data as T)
  return { say: message => opened.postMessage(message), close: () => opened.close() }
}

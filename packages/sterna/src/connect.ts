/** Starts Workers. */
import { SternaError } from './error.js'
import { Remote, type Port } from './rpc.js'
import type { Calls } from './types.js'

export interface Connection { remote: Remote<Calls>; end(): void }

function startWorker(): Connection {
  let worker: Worker
  try {
    worker = new Worker(new URL('./worker/main.js', import.meta.url), { type: 'module', name: 'sterna' })
  } catch (error) {
    if ((error as Error).name !== 'SecurityError') throw new SternaError('worker_failed', `This page can't start a Worker: ${(error as Error).message}`, { cause: error })
    // The package comes from another origin, such as a CDN: a Worker of this page's own imports it.
    const here = import.meta.url
    const shim = URL.createObjectURL(new Blob([`import ${JSON.stringify(new URL('./worker/main.js', here).href)}`], { type: 'text/javascript' }))
    worker = new Worker(shim, { type: 'module', name: 'sterna' })
  }
  const remote = new Remote<Calls>(worker as Port)
  worker.addEventListener('error', event => {
    event.preventDefault()
    remote.fail(new SternaError('worker_failed', `The Worker failed: ${event.message || 'its script could not be loaded'}`))
  })
  return { remote, end: () => worker.terminate() }
}

let start = startWorker

/** Another way to reach an engine, for tests without Workers. @internal */
export function connectBy(other: () => Connection): void { start = other }

export function connect(): Connection { return start() }

/** Starts Workers. */
import { SternaError } from './error.js'
import { Remote, type Port } from './rpc.js'
import type { Calls, WorkerOptions } from './types.js'

export interface Connection { remote: Remote<Calls>; end(): void }

/** The full address of what a page names. */
export const fullAddress = (address: string | URL) => new URL(address, globalThis.document?.baseURI ?? globalThis.location?.href)

const isForeign = ({ protocol, origin }: URL) => /^https?:$/.test(protocol) && origin !== globalThis.location?.origin

function startWorker({ workerUrl }: WorkerOptions): Connection {
  // In a bundle this isn't the package's own address, and may be none of the web.
  const here: string = import.meta.url
  const script = workerUrl === undefined ? new URL('./worker/main.js', here) : fullAddress(workerUrl)
  const foreign = isForeign(script)
  let shim: string | undefined
  let worker: Worker
  try {
    if (foreign) {
      // The package comes from another origin, such as a CDN: a Worker of this page's own imports it.
      shim = URL.createObjectURL(new Blob([`import ${JSON.stringify(script.href)}`], { type: 'text/javascript' }))
      worker = new Worker(shim, { type: 'module', name: 'sterna-worker' })
    } else if (workerUrl !== undefined) worker = new Worker(script, { type: 'module', name: 'sterna-worker' })
    // Bundlers know this form.
    else worker = new Worker(new URL('./worker/main.js', import.meta.url), { type: 'module', name: 'sterna-worker' })
  } catch (error) {
    throw notStarted(script, foreign, error)
  }
  const remote = new Remote<Calls>(worker as Port)
  let started = false
  worker.addEventListener('message', () => {
    started = true
    if (shim) URL.revokeObjectURL(shim)
  }, { once: true })
  worker.addEventListener('error', event => {
    event.preventDefault()
    remote.fail(started || event.message ? new SternaError('worker_failed', `The Worker failed: ${event.message || 'it ended'}`) : notStarted(script, foreign))
  })
  return { remote, end: () => worker.terminate() }
}

function notStarted({ href, origin }: URL, foreign: boolean, cause?: unknown): SternaError {
  const what = foreign
    ? `The Worker is on another origin, ${href}, and could be started neither there nor through a blob that imports it. `
      + `That needs Access-Control-Allow-Origin there and, where this page has a Content-Security-Policy, worker-src blob: and script-src ${origin} in it. `
      + 'Or give workerUrl, an address on this origin of a copy of the package\'s dist/worker/main.js with all that is beside it.'
    : `The Worker could not be started from ${href}. Is it there, and does this page's Content-Security-Policy have worker-src 'self'? `
      + 'Where a bundler loses it, give workerUrl, the address of the package\'s dist/worker/main.js.'
  return new SternaError('worker_failed', cause === undefined ? what : `${what} (${(cause as Error).message})`, cause === undefined ? {} : { cause })
}

let start = startWorker

/** Another way to reach an engine, for tests without Workers. @internal */
export function connectBy(other: () => Connection): void { start = other }

export function connect(options: WorkerOptions = {}): Connection { return start(options) }

/** Chooses, loads and starts a build of the engine. */
import type * as Constrained from '../constraint.js'
import type * as Wasm from '../engine.js'
import { SternaError } from '../error.js'
import type { WireEngine } from '../types.js'

/** What the rest of the Worker uses of a build. */
export interface Engine {
  Download: typeof Wasm.Download
  Model: typeof Wasm.Model
  sha256(bytes: Uint8Array): string
  version(): string
  /** Loads the module for constrained output. */
  constraints(): Promise<Pick<typeof Constrained, 'Vocabulary'>>
  /** 1 for the plain build. */
  threads: number
}

type Build = Pick<typeof Wasm, 'Download' | 'Model' | 'sha256' | 'version'>

/** A module of one function with `i8x16.splat`. */
const SIMD = new Uint8Array([
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 8, 1, 6, 0, 65, 0, 253, 15, 11,
])
export const haveSimd = () => WebAssembly.validate(SIMD)
/** Whether this Worker may share memory with others. */
export const haveThreads = () => globalThis.crossOriginIsolated === true && typeof SharedArrayBuffer !== 'undefined'

/**
 * How many threads are used: as many as asked for, else those of the processor less one for the page, at most 8.
 * 1 means the plain build.
 */
export function threadsFor({ threads, wasmUrl }: WireEngine): number {
  if (!haveThreads() || (wasmUrl.plain !== undefined && wasmUrl.threads === undefined)) return 1
  const cores = globalThis.navigator?.hardwareConcurrency ?? 1
  return Math.max(1, Math.floor(threads ?? Math.min(8, cores - 1)))
}

/** Loads the build that suits. Throws `unsupported` without SIMD, `worker_failed` if the module can't be had. */
export async function loadEngine(options: WireEngine): Promise<Engine> {
  if (!haveSimd()) throw new SternaError('unsupported', 'This browser has no WebAssembly SIMD; browsers since 2023 have.')
  const threads = threadsFor(options)
  const constraints = () => loadConstraints(options)
  try {
    if (threads > 1) {
      const build = await import('../wasm-threads/sterna_web.js')
      const module = await compile(options.wasmUrl.threads ?? new URL('../wasm-threads/sterna_web_bg.wasm', import.meta.url))
      const { memory } = await build.default({ module_or_path: module })
      await startThreads(threads - 1, module, memory)
      // Each says that it is ready just before it is.
      while (build.idleThreads() < threads - 1) await new Promise(resolve => setTimeout(resolve, 1))
      return { ...exportsOf(build), constraints, threads }
    }
    const build = await import('../wasm/sterna_web.js')
    await build.default(options.wasmUrl.plain === undefined ? undefined : { module_or_path: options.wasmUrl.plain })
    return { ...exportsOf(build), constraints, threads }
  } catch (error) {
    // A page may be isolated and the package yet lack that build.
    if (threads > 1) return loadEngine({ ...options, threads: 1 })
    throw new SternaError('worker_failed', `The engine could not be loaded: ${(error as Error).message}`, { cause: error })
  }
}

async function loadConstraints({ wasmUrl }: WireEngine): Promise<typeof Constrained> {
  try {
    const build = await import('../wasm-constraint/sterna_constraint_web.js')
    await build.default(wasmUrl.constraint === undefined ? undefined : { module_or_path: wasmUrl.constraint })
    return build
  } catch (error) {
    throw new SternaError('worker_failed', `The module for schemas could not be loaded: ${(error as Error).message}`, { cause: error })
  }
}

/** A module of several Workers, which compile it once. */
async function compile(url: string | URL): Promise<WebAssembly.Module> {
  const answer = await fetch(url)
  if (!answer.ok) throw new Error(`${url}: ${answer.status} ${answer.statusText}`)
  // As it arrives, where the server says what it is.
  if (answer.headers.get('Content-Type')?.startsWith('application/wasm')) return WebAssembly.compileStreaming(answer)
  return WebAssembly.compile(await answer.arrayBuffer())
}

/** Starts `n` Workers that share this one's memory, and end with it. */
async function startThreads(n: number, module: WebAssembly.Module, memory: WebAssembly.Memory): Promise<void> {
  const threads = Array.from({ length: n }, () => new Worker(new URL('./thread.js', import.meta.url), { type: 'module', name: 'sterna-thread' }))
  try {
    await Promise.all(threads.map(thread => new Promise<void>((resolve, reject) => {
      thread.addEventListener('message', () => resolve(), { once: true })
      thread.addEventListener('error', event => reject(new Error(event.message || 'a thread could not be started')), { once: true })
      thread.postMessage({ module, memory })
    })))
  } catch (error) {
    for (const thread of threads) thread.terminate()
    throw error
  }
}

function exportsOf(build: Build): Omit<Engine, 'constraints' | 'threads'> {
  return { Download: build.Download, Model: build.Model, sha256: build.sha256, version: build.version }
}

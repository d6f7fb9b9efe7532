/** Chooses, loads and starts a build of the engine. */
import type * as Wasm from '../engine.js'
import { SternaError } from '../error.js'
import type { WireEngine } from '../types.js'

/** What the rest of the Worker uses of a build. */
export interface Engine {
  Download: typeof Wasm.Download
  Model: typeof Wasm.Model
  sha256(bytes: Uint8Array): string
  version(): string
  /** 1 for the plain build. */
  threads: number
}

type Build = Pick<typeof Wasm, 'Download' | 'Model' | 'sha256' | 'version' | 'default'> & Partial<Pick<typeof Wasm, 'initThreadPool'>>

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
  try {
    // The build knows where its own `.wasm` file is; a bundler finds that there.
    const init = (url: string | undefined) => url === undefined ? undefined : { module_or_path: url }
    if (threads > 1) {
      const build: Build = await import('../wasm-threads/sterna_web.js')
      await build.default(init(options.wasmUrl.threads))
      await build.initThreadPool!(threads)
      return { ...exportsOf(build), threads }
    }
    const build: Build = await import('../wasm/sterna_web.js')
    await build.default(init(options.wasmUrl.plain))
    return { ...exportsOf(build), threads }
  } catch (error) {
    // A page may be isolated and the package yet lack that build.
    if (threads > 1) return loadEngine({ ...options, threads: 1 })
    throw new SternaError('worker_failed', `The engine could not be loaded: ${(error as Error).message}`, { cause: error })
  }
}

function exportsOf(build: Build): Omit<Engine, 'threads'> {
  return { Download: build.Download, Model: build.Model, sha256: build.sha256, version: build.version }
}

/** Chooses, loads and starts a build of the engine. */
import type * as Constrained from '../constraint.js'
import type * as Wasm from '../engine.js'
import { SternaError } from '../error.js'
import type { WireEngine } from '../types.js'
import { threadedBuild, type Share } from './threaded.js'

/** What the rest of the Worker uses of a build. */
export interface Engine {
  Conversion: typeof Wasm.Conversion
  Download: typeof Wasm.Download
  Model: typeof Wasm.Model
  Offer: typeof Wasm.Offer
  sha256(bytes: Uint8Array): string
  version(): string
  /** Loads the module for constrained output. */
  constraints(): Promise<Pick<typeof Constrained, 'Vocabulary'>>
  /** 1 for the builds without threads. */
  threads: number
  /** Whether it uses relaxed SIMD. */
  relaxedSimd: boolean
}

type Build = Pick<typeof Wasm, 'Conversion' | 'Download' | 'Model' | 'Offer' | 'sha256' | 'version'>

/** A module of one function with `i8x16.splat`. */
const SIMD = new Uint8Array([
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 8, 1, 6, 0, 65, 0, 253, 15, 11,
])
export const haveSimd = () => WebAssembly.validate(SIMD)
/** A module of `f`, the first lane of `i16x8.relaxed_dot_i8x16_i7x16_s` with bytes of -128 and of 127. */
const RELAXED_DOT = new Uint8Array([
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 127, 3, 2, 1, 0, 7, 5, 1, 1, 102, 0, 0,
  10, 20, 1, 18, 0, 65, 128, 127, 253, 15, 65, 255, 0, 253, 15, 253, 146, 2, 253, 24, 0, 11,
])
/** Whether relaxed SIMD is there, and exact where the engine uses it: early versions of it weren't everywhere. */
export function haveRelaxedSimd(): boolean {
  if (!WebAssembly.validate(RELAXED_DOT)) return false
  const { f } = new WebAssembly.Instance(new WebAssembly.Module(RELAXED_DOT)).exports as { f: () => number }
  return f() === 2 * -128 * 127
}
/** Whether this Worker may share memory with others. */
export const haveThreads = () => globalThis.crossOriginIsolated === true && typeof SharedArrayBuffer !== 'undefined'

/**
 * How many threads are used: as many as asked for, else those of the processor less one for the page, at most 8.
 * 1 means a build without threads.
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
  const relaxedSimd = relaxedFor(options, threads)
  try {
    return {
      ...await (threads > 1 ? loadWithThreads(options, threads, relaxedSimd) : loadPlain(options, relaxedSimd)),
      constraints: () => loadConstraints(options), threads, relaxedSimd,
    }
  } catch (error) {
    // A page may be isolated and the package yet lack that build; so may a copy of it without relaxed SIMD.
    if (relaxedSimd) return loadEngine({ ...options, relaxedSimd: false })
    if (threads > 1) return loadEngine({ ...options, threads: 1 })
    throw new SternaError('worker_failed', `The engine could not be loaded: ${(error as Error).message}`, { cause: error })
  }
}

/** Whether the build with relaxed SIMD is taken: where the address of one is known, unless `relaxedSimd` is false. */
function relaxedFor({ relaxedSimd, wasmUrl }: WireEngine, threads: number): boolean {
  if (relaxedSimd === false || !haveRelaxedSimd()) return false
  return wasmUrl.plain === undefined || wasmUrl[threads > 1 ? 'threadsRelaxed' : 'relaxed'] !== undefined
}

type Exports = Omit<Engine, 'constraints' | 'threads' | 'relaxedSimd'>

async function loadPlain({ wasmUrl }: WireEngine, relaxedSimd: boolean): Promise<Exports> {
  const build = relaxedSimd ? await import('../wasm-relaxed/sterna_web.js') : await import('../wasm/sterna_web.js')
  const url = relaxedSimd ? wasmUrl.relaxed : wasmUrl.plain
  await build.default(url === undefined ? undefined : { module_or_path: url })
  return exportsOf(build)
}

async function loadWithThreads({ wasmUrl }: WireEngine, threads: number, relaxedSimd: boolean): Promise<Exports> {
  const build = await threadedBuild(relaxedSimd)
  const module = await compile(relaxedSimd
    ? wasmUrl.threadsRelaxed ?? new URL('../wasm-threads-relaxed/sterna_web_bg.wasm', import.meta.url)
    : wasmUrl.threads ?? new URL('../wasm-threads/sterna_web_bg.wasm', import.meta.url))
  const { memory } = await build.default({ module_or_path: module })
  await startThreads(threads - 1, { module, memory, relaxedSimd })
  // Each says that it is ready just before it is.
  while (build.idleThreads() < threads - 1) await new Promise(resolve => setTimeout(resolve, 1))
  return exportsOf(build)
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
async function startThreads(n: number, share: Share): Promise<void> {
  const threads = Array.from({ length: n }, () => new Worker(new URL('./thread.js', import.meta.url), { type: 'module', name: 'sterna-thread' }))
  try {
    await Promise.all(threads.map(thread => new Promise<void>((resolve, reject) => {
      thread.addEventListener('message', () => resolve(), { once: true })
      thread.addEventListener('error', event => reject(new Error(event.message || 'a thread could not be started')), { once: true })
      thread.postMessage(share)
    })))
  } catch (error) {
    for (const thread of threads) thread.terminate()
    throw error
  }
}

function exportsOf(build: Build): Exports {
  return { Conversion: build.Conversion, Download: build.Download, Model: build.Model, Offer: build.Offer, sha256: build.sha256, version: build.version }
}

/** The engine's builds with threads, which a model's Worker and its threads load. */
import type * as Wasm from '../engine.js'

/** What a thread is told. */
export interface Share { module: WebAssembly.Module; memory: WebAssembly.Memory; relaxedSimd: boolean }

/** The bindings of a build. */
export const threadedBuild = (relaxedSimd: boolean): Promise<typeof Wasm> =>
  relaxedSimd ? import('../wasm-threads-relaxed/sterna_web.js') : import('../wasm-threads/sterna_web.js')

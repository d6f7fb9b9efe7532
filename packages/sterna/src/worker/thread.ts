/** A thread of the engine: a Worker that shares its memory, and never answers another message. */
import { initSync, lendThread } from '../wasm-threads/sterna_web.js'

addEventListener('message', ({ data }: MessageEvent<{ module: WebAssembly.Module; memory: WebAssembly.Memory }>) => {
  initSync(data)
  postMessage('ready')
  lendThread()
}, { once: true })

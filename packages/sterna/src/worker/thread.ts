/** A thread of the engine: a Worker that shares its memory, and never answers another message. */
import { threadedBuild, type Share } from './engine.js'

addEventListener('message', async ({ data: { module, memory, relaxedSimd } }: MessageEvent<Share>) => {
  const { initSync, lendThread } = await threadedBuild(relaxedSimd)
  initSync({ module, memory })
  postMessage('ready')
  lendThread()
}, { once: true })

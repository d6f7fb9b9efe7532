/** A thread of the engine: a Worker that shares its memory, and never answers another message. */
import { threadedBuild, type Share } from './threaded.js'

async function lend({ module, memory, relaxedSimd }: Share): Promise<void> {
  const { initSync, lendThread } = await threadedBuild(relaxedSimd)
  initSync({ module, memory })
  postMessage('ready')
  lendThread()
}

// Whoever waits for the thread hears of errors, which a rejected promise wouldn't tell.
addEventListener('message', ({ data }: MessageEvent<Share>) => lend(data).catch(reportError), { once: true })

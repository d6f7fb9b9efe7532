/** `fetch` for the downloader. */
import type { Http, HttpAnswer } from '../engine.js'

/** A connection that gives nothing for so long counts as broken, and the downloader tries again. */
const STALL_MS = 30_000

export const http: Http = {
  async open(url, start, end): Promise<HttpAnswer> {
    const controller = new AbortController()
    const headers = start === undefined ? {} : { Range: `bytes=${start}-${end === undefined ? '' : end - 1}` }
    // Not kept by the browser's cache: the store keeps it.
    const answer = await timely(fetch(url, { headers, signal: controller.signal, cache: 'no-store', credentials: 'same-origin' }))
    const reader = answer.body?.getReader()
    return {
      status: answer.status,
      header: name => answer.headers.get(name) ?? undefined,
      async read() {
        return (await timely(reader?.read() ?? Promise.resolve(undefined)))?.value
      },
      cancel: () => controller.abort(),
    }

    async function timely<T>(promise: Promise<T>): Promise<T> {
      let timer: ReturnType<typeof setTimeout> | undefined
      const stalled = new Promise<never>((_, reject) => {
        timer = setTimeout(() => {
          reject(new Error(`${url}: no answer for ${STALL_MS / 1000} seconds`))
          controller.abort()
        }, STALL_MS)
      })
      try {
        return await Promise.race([promise, stalled])
      } finally {
        clearTimeout(timer)
      }
    }
  },
}

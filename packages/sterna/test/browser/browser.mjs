// Headless Chromium with a software WebGPU adapter, and a server of files that can be slow, silent or isolated.
import { once } from 'node:events'
import http from 'node:http'
import { existsSync, readFileSync, statSync } from 'node:fs'
import path from 'node:path'
import { chromium } from 'playwright-core'

export const executable = process.env.CHROMIUM ?? ['/usr/bin/chromium', '/usr/bin/chromium-browser', '/usr/bin/google-chrome'].find(existsSync)

/** A browser that keeps its storage in `folder`. */
export function openBrowser(folder) {
  return chromium.launchPersistentContext(folder, {
    executablePath: executable,
    args: ['--headless=new', '--no-sandbox', '--disable-dev-shm-usage', '--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader'],
    ignoreDefaultArgs: ['--disable-gpu'],
  })
}

const TYPES = { '.html': 'text/html', '.js': 'text/javascript', '.mjs': 'text/javascript', '.json': 'application/json', '.wasm': 'application/wasm' }

/**
 * Serves `mounts`: from a prefix of paths to a folder, or from a path to bytes.
 *
 * `state.silent(path)` leaves a request unanswered, `state.bytesPerSecond(path)` slows it, `state.holdAt(path)` is
 * after how many bytes the answer to a request goes no further, `state.before(path)` is a script to run before that
 * of the path; `state.sent` has the bytes of bodies by path, `state.requests` what was asked for.
 */
export async function serve(mounts, { isolate = false } = {}) {
  const state = { reset: () => Object.assign(state, { requests: [], sent: {}, silent: () => false, bytesPerSecond: () => Infinity, holdAt: () => Infinity, before: () => '' }) }
  state.reset()
  const server = http.createServer(async (request, response) => {
    const name = decodeURIComponent(new URL(request.url, 'http://x').pathname)
    state.requests.push(name)
    if (state.silent(name)) return request.destroy()
    const before = state.before(name)
    const found = find(mounts, name)
    const body = found && before ? Buffer.concat([Buffer.from(before), found]) : found
    response.setHeader('Access-Control-Allow-Origin', '*')
    if (isolate) {
      response.setHeader('Cross-Origin-Opener-Policy', 'same-origin')
      response.setHeader('Cross-Origin-Embedder-Policy', 'require-corp')
      response.setHeader('Cross-Origin-Resource-Policy', 'cross-origin')
    }
    if (!body) return response.writeHead(404).end()
    const range = /^bytes=(\d+)-(\d*)$/.exec(request.headers.range ?? '')
    const from = range ? Number(range[1]) : 0, to = range?.[2] ? Math.min(Number(range[2]) + 1, body.length) : body.length
    response.writeHead(range ? 206 : 200, {
      'Content-Type': name === '/' ? 'text/html' : TYPES[path.extname(name)] ?? 'application/octet-stream', 'Content-Length': to - from, 'Accept-Ranges': 'bytes',
      ETag: `"${body.length}"`, ...(range ? { 'Content-Range': `bytes ${from}-${to - 1}/${body.length}` } : {}),
    })
    const piece = 16384
    const closed = once(response, 'close')
    const hold = from + state.holdAt(name)
    for (let at = from; at < to; at += piece) {
      if (at >= hold) await closed
      if (response.destroyed) break
      const bytes = body.subarray(at, Math.min(to, at + piece))
      state.sent[name] = (state.sent[name] ?? 0) + bytes.length
      if (!response.write(bytes)) await Promise.race([once(response, 'drain'), closed])
      const rate = state.bytesPerSecond(name)
      if (rate < Infinity) await new Promise(done => setTimeout(done, bytes.length / rate * 1000))
    }
    response.end()
  })
  await new Promise(done => server.listen(0, '127.0.0.1', done))
  return { state, url: `http://127.0.0.1:${server.address().port}/`, close: () => (server.closeAllConnections(), server.close()) }
}

function find(mounts, name) {
  if (mounts[name] instanceof Uint8Array) return mounts[name]
  const prefix = Object.keys(mounts).find(prefix => prefix.endsWith('/') && prefix !== '/' && name.startsWith(prefix))
  if (!prefix) return undefined
  const file = path.join(mounts[prefix], name.slice(prefix.length))
  return file.startsWith(mounts[prefix]) && existsSync(file) && statSync(file).isFile() ? readFileSync(file) : undefined
}

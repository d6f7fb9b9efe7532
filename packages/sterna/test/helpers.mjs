// The package against the fake engine, in this process, and a server of files.
import { createHash } from 'node:crypto'
import { once } from 'node:events'
import http from 'node:http'
import { connectBy } from '../dist/connect.js'
import { Remote, serve } from '../dist/rpc.js'
import { makeCalls } from '../dist/worker/calls.js'
import * as fake from './fake-engine.mjs'

export const seen = fake.seen

/** Makes `Sterna` use the fake engine. Each connection has its own, as each model has its own Worker. */
export function useFakeEngine() {
  connectBy(() => {
    const { port1, port2 } = new MessageChannel()
    serve(port2, makeCalls(async () => ({ ...fake, threads: 1, relaxedSimd: false })))
    return { remote: new Remote(port1), end: () => port1.close() }
  })
  Object.assign(seen, { starts: [], prompts: [], cancels: 0, adapters: [], freed: 0, fetched: [], downloads: [], vocabularies: [], replies: [], awaitPeers: 0, stepMs: 0, lost: undefined, recovered: 0 })
  seen.sessions.clear()
}

const hash = bytes => createHash('sha256').update(bytes).digest('hex')

/** A package of shards with the given bytes. */
export function makePackage(shards) {
  const files = {}
  const listed = shards.map((bytes, i) => {
    const filename = `shard_${String(i).padStart(5, '0')}.bin`
    files[`/${filename}`] = bytes
    return { index: i, filename, size: bytes.length, hash: hash(bytes) }
  })
  files['/manifest.json'] = Buffer.from(JSON.stringify({ version: 1, modelId: 'tiny', hashAlgorithm: 'sha256', shards: listed }))
  return files
}

/** Deterministic bytes that differ by `seed`. */
export function bytes(size, seed = 1) {
  const out = Buffer.alloc(size)
  for (let i = 0, x = seed; i < size; i++) out[i] = (x = (Math.imul(x, 1103515245) + 12345) >>> 0) >>> 16
  return out
}

/** Serves `files`; `state.requests` tells what was asked, `state.msPerPiece` slows bodies, `state.breakAfter` cuts them. */
export async function serveFiles(files) {
  const state = { requests: [], msPerPiece: 0, breakAfter: Infinity }
  const server = http.createServer(async (request, response) => {
    const body = files[request.url]
    state.requests.push(`${request.url} ${request.headers.range ?? ''}`.trim())
    response.setHeader('Access-Control-Allow-Origin', '*')
    if (!body) return response.writeHead(404).end()
    const range = /^bytes=(\d+)-(\d*)$/.exec(request.headers.range ?? '')
    const from = range ? Number(range[1]) : 0, to = range?.[2] ? Number(range[2]) + 1 : body.length
    response.writeHead(range ? 206 : 200, { 'Content-Length': to - from, ...(range ? { 'Content-Range': `bytes ${from}-${to - 1}/${body.length}` } : {}) })
    const closed = once(response, 'close')
    for (let at = from; at < to; at += 16384) {
      if (at - from >= state.breakAfter) return response.destroy()
      if (!response.write(body.subarray(at, Math.min(to, at + 16384)))) await Promise.race([once(response, 'drain'), closed])
      if (state.msPerPiece && range) await new Promise(done => setTimeout(done, state.msPerPiece))
      if (response.destroyed) return
    }
    response.end()
  })
  await new Promise(done => server.listen(0, '127.0.0.1', done))
  return { state, url: `http://127.0.0.1:${server.address().port}/`, close: () => (server.closeAllConnections(), server.close()) }
}

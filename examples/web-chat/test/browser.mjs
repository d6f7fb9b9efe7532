// A server of the examples as they are hosted, with the fake package, and a browser.
import { createServer } from 'node:http'
import { existsSync, readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { extname, join } from 'node:path'
import { fileURLToPath } from 'node:url'

const need = createRequire(join(process.cwd(), 'x.js'))
const examples = fileURLToPath(new URL('../..', import.meta.url))
const folders = { chat: 'web-chat', tldr: 'tldr-widget' }
const types = { '.html': 'text/html; charset=utf-8', '.js': 'text/javascript', '.css': 'text/css', '.svg': 'image/svg+xml', '.wasm': 'application/wasm', '.webmanifest': 'application/manifest+json' }

// With STERNA_DIST, the folder of the built package, and STERNA_MODEL, a GGUF file of a small model: the real ones.
const { STERNA_DIST: dist, STERNA_MODEL: modelFile } = process.env

/** Without the headers of isolation, as a plain host. `site.models` is what /models.json says, `site.answers` has the
 * answers of models that the server computes, by their names: a text, or `{ thought, text }`. With `site.key` it asks
 * for that key; `site.busy` is after how many seconds a client may ask again. Without `site.hasPackage` pages can only
 * ask the server. */
export async function serve(port = 0) {
  const site = { models: undefined, answers: undefined, key: undefined, busy: undefined, hasPackage: true, asked: [], port, open, close }
  let server
  function open() {
    server = createServer((request, response) => {
      const { url, method, headers } = request
      response.setHeader('Access-Control-Allow-Origin', '*')
      response.setHeader('Access-Control-Allow-Headers', '*')
      response.setHeader('Access-Control-Expose-Headers', 'Accept-Ranges, Content-Length, Content-Range, ETag')
      if (method === 'OPTIONS') return response.writeHead(204).end()
      const [, top, ...rest] = new URL(url, 'http://x').pathname.split('/')
      const path = join(examples, folders[top] ?? 'none', rest.join('/') || 'index.html')
      const send = (type, body) => response.writeHead(200, { 'Content-Type': type, 'Cache-Control': 'no-store' }).end(body)
      if (top === 'models.json' && site.models) send('application/json', JSON.stringify(site.models))
      else if (top === 'v1' && site.answers) void answer(request, rest.join('/'), response)
      else if (folders[top] && rest[0] === 'sterna.js') send('text/javascript', site.hasPackage ? `export { Sterna } from './sterna/index.js'` : 'export const Sterna = undefined')
      // Inside the folder of each, since a service worker brings only the Workers whose scripts are in its scope.
      else if (folders[top] && rest[0] === 'sterna') {
        const file = dist ? join(dist, ...rest.slice(1)) : fileURLToPath(new URL('fake.js', import.meta.url))
        if (existsSync(file)) send(types[extname(file)], readFileSync(file))
        else response.writeHead(404).end()
      }
      else if (top === 'model' && modelFile) sendRange(headers.range, readFileSync(modelFile), response)
      else if (existsSync(path)) send(types[extname(path)] ?? 'application/octet-stream', readFileSync(path))
      else response.writeHead(404).end()
    })
    return new Promise(resolve => server.listen(site.port, '127.0.0.1', () => resolve(site.port = server.address().port)))
  }
  /** The API, in as much of it as the page uses. */
  async function answer(request, path, response) {
    const refuse = (status, message, headers = {}) => response.writeHead(status, headers).end(JSON.stringify({ error: { message } }))
    if (site.key && request.headers.authorization !== `Bearer ${site.key}`) return refuse(401, 'expected a key that is let in')
    if (path === 'models') return response.end(JSON.stringify({ data: Object.keys(site.answers).map(id => ({ id, max_model_len: 4096 })) }))
    let body = ''
    for await (const piece of request) body += piece
    const asked = JSON.parse(body)
    site.asked.push(asked)
    if (site.busy) return refuse(429, 'the key has spent its requests of this minute', { 'Retry-After': site.busy })
    const answer = site.answers[asked.model]
    if (!answer) return refuse(404, `the model \`${asked.model}\` does not exist`)
    const { thought, text } = typeof answer === 'string' ? { text: answer } : answer
    response.writeHead(200, { 'Content-Type': 'text/event-stream' })
    const send = chunk => response.write(`data: ${JSON.stringify(chunk)}\n\n`)
    const wordsOf = text => text?.match(/\s*\S+/g) ?? []
    const words = wordsOf(text)
    for (const delta of [...wordsOf(thought).map(reasoning => ({ reasoning, reasoning_content: reasoning })), ...words.map(content => ({ content }))]) {
      if (response.destroyed) return
      send({ choices: [{ index: 0, delta, finish_reason: null }] })
      await new Promise(resolve => setTimeout(resolve, site.pace ?? 2))
    }
    send({ choices: [{ index: 0, delta: {}, finish_reason: 'stop' }] })
    send({ choices: [], usage: { completion_tokens: words.length } })
    response.end('data: [DONE]\n\n')
  }
  function close() {
    server.closeAllConnections()
    return new Promise(resolve => server.close(resolve))
  }
  await open()
  return site
}
function sendRange(range, bytes, response) {
  const [, from, to] = /^bytes=(\d+)-(\d*)$/.exec(range ?? '') ?? []
  const headers = { 'Content-Type': 'application/octet-stream', 'Accept-Ranges': 'bytes', ETag: '"1"' }
  if (from === undefined) return response.writeHead(200, { ...headers, 'Content-Length': bytes.length }).end(bytes)
  const end = Math.min(to ? Number(to) : Infinity, bytes.length - 1)
  response.writeHead(206, { ...headers, 'Content-Range': `bytes ${from}-${end}/${bytes.length}`, 'Content-Length': end - from + 1 }).end(bytes.subarray(Number(from), end + 1))
}
export const origin = site => `http://127.0.0.1:${site.port}`

export function openBrowser() {
  const executablePath = [process.env.CHROMIUM, '/usr/lib/chromium/chromium', '/usr/bin/chromium', '/usr/bin/google-chrome'].find(path => path && existsSync(path))
  return need('playwright-core').chromium.launch({ executablePath, args: ['--no-sandbox', '--disable-dev-shm-usage'] })
}

/** What axe finds, best practices included. */
export async function axe(page) {
  const { AxeBuilder } = need('@axe-core/playwright')
  return (await new AxeBuilder({ page }).analyze()).violations
}

// A server of the examples as they are hosted, with the fake package, and a browser.
import { createServer } from 'node:http'
import { existsSync, readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { extname, join } from 'node:path'
import { fileURLToPath } from 'node:url'

const need = createRequire(join(process.cwd(), 'x.js'))
const examples = fileURLToPath(new URL('../..', import.meta.url))
const folders = { chat: 'web-chat', tldr: 'tldr-widget' }
const types = { '.html': 'text/html; charset=utf-8', '.js': 'text/javascript', '.css': 'text/css', '.svg': 'image/svg+xml', '.webmanifest': 'application/manifest+json' }

/** Without the headers of isolation, as a plain host. `site.models` is what /models.json says. */
export async function serve(port = 0) {
  const site = { models: undefined, port, open, close }
  let server
  function open() {
    server = createServer(({ url }, response) => {
      const [, top, ...rest] = new URL(url, 'http://x').pathname.split('/')
      const path = join(examples, folders[top] ?? 'none', rest.join('/') || 'index.html')
      const send = (type, body) => response.writeHead(200, { 'Content-Type': type, 'Cache-Control': 'no-store', 'Access-Control-Allow-Origin': '*' }).end(body)
      if (top === 'models.json' && site.models) send('application/json', JSON.stringify(site.models))
      else if (rest.at(-1) === 'sterna.js') send('text/javascript', `export { Sterna } from '/sterna/index.js'`)
      else if (top === 'sterna') send('text/javascript', readFileSync(new URL('fake.js', import.meta.url)))
      else if (existsSync(path)) send(types[extname(path)] ?? 'application/octet-stream', readFileSync(path))
      else response.writeHead(404).end()
    })
    return new Promise(resolve => server.listen(site.port, '127.0.0.1', () => resolve(site.port = server.address().port)))
  }
  function close() {
    server.closeAllConnections()
    return new Promise(resolve => server.close(resolve))
  }
  await open()
  return site
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

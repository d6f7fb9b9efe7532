// The app's files, kept for use without a network. Models are kept by the package, not here.
const VERSION = '0.1.0'
const CACHE = `sterna-chat ${VERSION}`
const SHELL = /\.(js|css|svg|wasm|webmanifest)$/
const LINKS = /(?:href|src)="([^"#:]+)"/g
const IMPORTS = /(?:\bfrom|\bimport)\s*\(?\s*['"](\.{0,2}\/[^'"]+)['"]|new URL\(\s*['"]([^'":]+)['"],\s*import\.meta\.url/g

addEventListener('install', event => event.waitUntil(fill()))
addEventListener('activate', event => event.waitUntil(clean()))
addEventListener('message', event => event.data === 'skipWaiting' && skipWaiting())
addEventListener('fetch', event => {
  const { request } = event
  const url = new URL(request.url)
  if (request.method !== 'GET' || url.origin !== location.origin || request.headers.has('range')) return
  if (url.pathname === '/models.json') event.respondWith(newest(request))
  else if (request.mode === 'navigate') event.respondWith(kept('./', request))
  else if (SHELL.test(url.pathname)) event.respondWith(kept(url.origin + url.pathname, request))
})

/** Fetches the page and what it names, scripts and what they import, so that there is no list to keep. */
async function fill() {
  const cache = await caches.open(CACHE)
  const seen = new Set()
  const add = async (address, base, required) => {
    const { origin, pathname } = new URL(address, base)
    const url = origin + pathname
    if (seen.has(url) || origin !== location.origin) return
    seen.add(url)
    const response = await fetch(url, { cache: 'no-cache' })
    // A build of the package without threads lacks some.
    if (!response.ok && !required) return
    if (!response.ok) throw new Error(`${url}: HTTP ${response.status}`)
    await cache.put(url, isolated(response.clone()))
    const page = /html/.test(response.headers.get('content-type'))
    if (!page && !url.endsWith('.js')) return
    const text = await response.text()
    await Promise.all([...text.matchAll(page ? LINKS : IMPORTS)].map(([, a, b]) => add(a ?? b, url, page)))
  }
  await add('./', location.href, true)
}

/** With the headers that let a page use threads, for hosts that can't send them. */
function isolated({ body, headers: sent, status, statusText }) {
  const headers = new Headers(sent)
  headers.set('Cross-Origin-Opener-Policy', 'same-origin')
  headers.set('Cross-Origin-Embedder-Policy', 'require-corp')
  return new Response(body, { headers, status, statusText })
}

async function clean() {
  for (const name of await caches.keys()) if (name.startsWith('sterna-chat ') && name !== CACHE) await caches.delete(name)
  await clients.claim()
}

async function kept(url, request) {
  return await (await caches.open(CACHE)).match(url) ?? fetch(request)
}

async function newest(request) {
  const cache = await caches.open(CACHE)
  try {
    const response = await fetch(request)
    if (response.ok) await cache.put(request, response.clone())
    return response
  } catch (error) {
    return await cache.match(request) ?? Promise.reject(error)
  }
}

// Keeps the page and the widget's scripts for use without a network: newest first, kept copies where there is none.
// A page of another site can have it by a file of its own: `importScripts('https://host/tldr/sw.js')`.
const CACHE = 'sterna-tldr'
const FIRST = ['./', 'sterna-tldr.js', 'demo.css', 'demo.js']

addEventListener('install', event => event.waitUntil((async () => {
  const cache = await caches.open(CACHE)
  // On other sites some of them are elsewhere; those are kept when they are loaded next.
  await Promise.all(FIRST.map(file => cache.add(file).catch(() => {})))
  await skipWaiting()
})()))
addEventListener('activate', event => event.waitUntil(clients.claim()))
addEventListener('fetch', event => {
  const { request } = event
  const { pathname } = new URL(request.url)
  const ours = request.mode === 'navigate' || /^(script|style|worker|image)$/.test(request.destination) || /\.(js|wasm)$/.test(pathname)
  if (request.method === 'GET' && ours && !request.headers.has('range')) event.respondWith(newest(request))
})

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

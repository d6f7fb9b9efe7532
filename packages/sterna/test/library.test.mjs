import assert from 'node:assert/strict'
import { after, before, beforeEach, test } from 'node:test'
import { indexedDB, IDBKeyRange } from 'fake-indexeddb'
import { Sterna } from '../dist/index.js'
import { addressOf, wireSource } from '../dist/source.js'
import { openStore, readFile, writeFile } from '../dist/worker/store.js'
import { convert, keyOf, openSource, remove } from '../dist/worker/library.js'
import { bytes, makePackage, seen, serveFiles, useFakeEngine } from './helpers.mjs'
import { locks } from './locks.mjs'
import * as fake from './fake-engine.mjs'

let quota = 1e9
Object.defineProperty(globalThis, 'navigator', { configurable: true, value: {
  locks, hardwareConcurrency: 2,
  storage: { estimate: async () => ({ usage: 1000, quota }), persist: async () => true, persisted: async () => true },
} })
Object.assign(globalThis, { indexedDB, IDBKeyRange })

let site, files
before(async () => {
  files = makePackage([bytes(300_000, 1), bytes(200_000, 2)])
  Object.assign(files, { '/sub/x.gguf': bytes(1000) })
  site = await serveFiles(files)
})
after(() => site.close())
beforeEach(async () => {
  useFakeEngine()
  quota = 1e9
  Object.assign(site.state, { requests: [], msPerPiece: 0, breakAfter: Infinity })
  assert.equal(typeof await Sterna.models.purge(), 'number')
})
const shardRequests = () => site.state.requests.filter(request => request.includes('shard'))

test('a package arrives, is listed, and is loaded again without the network', async () => {
  const progress = []
  const model = await Sterna.load(site.url, { onProgress: p => progress.push(p) })
  assert.equal(progress.at(-1).phase, 'load')
  const last = progress.filter(({ phase }) => phase === 'download').at(-1)
  assert.equal(last.doneBytes, last.totalBytes)
  await assert.rejects(Sterna.models.remove(site.url), { code: 'busy' })
  await model.dispose()
  const [stored] = await Sterna.models.list()
  assert.deepEqual([stored.source, stored.complete, stored.store, stored.totalBytes], [site.url, true, 'indexeddb', last.totalBytes])
  assert.ok((await Sterna.models.usage()).modelBytes >= 500_000)

  site.state.requests = []
  const again = await Sterna.load(site.url)
  assert.deepEqual(site.state.requests, ['/manifest.json'])
  await again.dispose()
  assert.deepEqual(await Sterna.models.verify(site.url), [])
  assert.equal(await Sterna.models.remove(stored.id), true)
  assert.equal(await Sterna.models.remove(stored.id), false)
  assert.deepEqual(await Sterna.models.list(), [])
})

test('a broken download is continued where it was', async () => {
  site.state.breakAfter = 100_000
  await assert.rejects(Sterna.load(site.url), { code: 'io' })
  const [stored] = await Sterna.models.list()
  assert.equal(stored.complete, false)
  site.state.breakAfter = Infinity
  seen.fetched = []
  await (await Sterna.load(site.url)).dispose()
  assert.equal(seen.fetched[0].name, 'shard_00000.bin')
  assert.ok(seen.fetched[0].from >= 65536, `from ${seen.fetched[0].from}`)
})

test('an aborted load keeps what arrived', async () => {
  site.state.msPerPiece = 5
  const controller = new AbortController()
  await assert.rejects(Sterna.load(site.url, {
    signal: controller.signal, onProgress: ({ doneBytes }) => { if (doneBytes > 200_000) controller.abort() },
  }), { code: 'cancelled' })
  seen.fetched = []
  await (await Sterna.load(site.url)).dispose()
  assert.ok(seen.fetched[0].from >= 65536)
})

test('damage is found when the store is read, and mended', async () => {
  await (await Sterna.load(site.url)).dispose()
  const folder = await (await openStore('indexeddb')).folder(keyOf(site.url))
  const flip = async name => {
    const data = await readFile(folder, name)
    data[data.length - 1] ^= 4
    await writeFile(folder, name, data)
  }
  await flip('shard_00001.bin')
  const notices = []
  site.state.requests = []
  await (await Sterna.load(site.url, { onNotice: notice => notices.push(notice.code) })).dispose()
  assert.deepEqual(notices, ['damaged_file'])
  assert.equal(shardRequests().length, 1)

  await flip('shard_00000.bin')
  assert.deepEqual(await Sterna.models.verify(site.url), ['shard_00000.bin'])
  assert.equal((await Sterna.models.list())[0].complete, false)
  await flip('shard_00001.bin')
  assert.deepEqual(await Sterna.models.verify(site.url, { mend: true }), ['shard_00001.bin'])
  assert.equal((await Sterna.models.list())[0].complete, true)
})

test('two loads share one download, and both tell of it', async () => {
  site.state.msPerPiece = 5
  const phases = [new Set(), new Set()]
  const models = await Promise.all(phases.map(set => Sterna.load(site.url, { onProgress: ({ phase }) => set.add(phase) })))
  assert.equal(shardRequests().length, 2)
  assert.ok(phases.some(set => set.has('waiting')) && phases.some(set => set.has('download')))
  await Promise.all(models.map(model => model.dispose()))
})

test('when the one that fetches gives up, the other goes on', async () => {
  site.state.msPerPiece = 5
  const controller = new AbortController()
  const first = Sterna.load(site.url, { signal: controller.signal })
  first.catch(() => {})
  while (shardRequests().length === 0) await new Promise(done => setTimeout(done, 5))
  const second = Sterna.load(site.url, { onProgress: ({ phase, doneBytes }) => { if (phase === 'waiting' && doneBytes > 150_000) controller.abort() } })
  await assert.rejects(first, { code: 'cancelled' })
  await (await second).dispose()
  assert.ok(seen.fetched.find(({ from }) => from >= 65536), JSON.stringify(seen.fetched))
})

test('a model that has no room is refused before it is fetched', async () => {
  quota = 400_000
  await assert.rejects(Sterna.load(site.url), error => error.code === 'quota' && /0\.5 MB more/.test(error.message) && /0\.4 MB/.test(error.message))
  assert.equal(shardRequests().length, 0)
  const plan = await Sterna.plan(site.url)
  assert.deepEqual([plan.fits, plan.files.length, plan.freeBytes], [false, 3, 399_000])
  quota = 1e9
  assert.equal((await Sterna.plan(site.url)).fits, true)
  await (await Sterna.load(site.url, { store: 'memory' })).dispose()
})

test('errors name what is wrong', async () => {
  await assert.rejects(Sterna.load(`${site.url}nothing/`), { code: 'not_found' })
  await assert.rejects(Sterna.load('http://127.0.0.1:1/'), { code: 'io' })
  await assert.rejects(Sterna.load(7), { code: 'invalid_request' })
  await assert.rejects(Sterna.load(site.url, { signal: AbortSignal.abort() }), { code: 'cancelled' })
  const wrong = await serveFiles({ ...files, '/shard_00001.bin': bytes(200_000, 3) })
  await assert.rejects(Sterna.load(wrong.url), { code: 'hash_mismatch' })
  wrong.close()
})

test('a stored repository is used where nobody answers, and that is told', async () => {
  const hub = await serveFiles({
    '/api/models/owner/repo/revision/main?blobs=true': Buffer.from('{"siblings":[{"rfilename":"tiny.gguf","size":200000}]}'),
    '/owner/repo/resolve/main/tiny.gguf': bytes(200_000),
  })
  const { fetch } = globalThis
  let online = true
  globalThis.fetch = async (url, init) => {
    const { origin, pathname, search } = new URL(url)
    if (origin !== 'https://huggingface.co') return fetch(url, init)
    if (!online) throw new TypeError('Failed to fetch')
    return fetch(new URL(pathname + search, hub.url), init)
  }
  try {
    const trust = [{ name: 'someone', key: 'RWQ' }]
    await (await Sterna.load('owner/repo', { file: 'tiny.gguf', trust })).dispose()
    assert.deepEqual(seen.downloads.at(-1).trust, trust)
    const [stored] = await Sterna.models.list()
    assert.deepEqual([stored.source, stored.file, stored.complete], ['https://huggingface.co/owner/repo', 'tiny.gguf', true])
    online = false
    for (const verify of ['sample', 'full']) {
      const notices = []
      await (await Sterna.load('owner/repo', { file: 'tiny.gguf', verify, onNotice: ({ code }) => notices.push(code) })).dispose()
      assert.deepEqual(notices, ['offline'])
    }
    assert.deepEqual([(await Sterna.plan('owner/repo', { file: 'tiny.gguf' })).missingBytes, await Sterna.models.verify(stored.id)], [0, []])
    await assert.rejects(Sterna.load('owner/repo'), { code: 'io' })
    const folder = await (await openStore('indexeddb')).folder(stored.id)
    await folder.remove('tiny.gguf')
    await assert.rejects(Sterna.load('owner/repo', { file: 'tiny.gguf' }), { code: 'io' })
  } finally {
    globalThis.fetch = fetch
    hub.close()
  }
})

test('loading overlaps the download', async () => {
  site.state.msPerPiece = 5
  const opened = await openSource(fake, wireSource(site.url), { signal: new AbortController().signal, emit() {} })
  let arrived = false
  void opened.arrived.then(() => { arrived = true })
  assert.equal(await opened.files.len('shard_00000.bin'), 300_000)
  assert.equal((await opened.files.read('shard_00000.bin', 0, 10)).length, 10)
  assert.equal(arrived, false)
  await opened.arrived
  opened.close()
  await new Promise(done => setTimeout(done))
  assert.equal(await remove(site.url), true)
})

test('files and folders of the user are read where they are', async () => {
  const { signal } = new AbortController()
  const opened = await openSource(fake, wireSource(new File([bytes(100)], 'x.gguf')), { signal, emit() {} })
  assert.deepEqual([opened.entry, await opened.files.len('x.gguf'), (await opened.files.read('x.gguf', 10, 20)).length], ['x.gguf', 100, 10])
  assert.equal(await opened.files.len('y'), undefined)
  const file = name => ({ kind: 'file', name, getFile: async () => new File([bytes(10)], name) })
  const missing = () => { throw new DOMException('none', 'NotFoundError') }
  const sub = { kind: 'directory', getFileHandle: async name => name === 'z.bin' ? file(name) : missing() }
  const handle = {
    kind: 'directory', name: 'folder',
    getDirectoryHandle: async name => name === 'sub' ? sub : missing(),
    getFileHandle: async name => name === 'manifest.json' ? file(name) : missing(),
    async *entries() { yield ['manifest.json', file('manifest.json')]; yield ['sub', sub] },
  }
  const folder = await openSource(fake, wireSource(handle), { signal, emit() {} })
  assert.deepEqual([folder.entry, await folder.files.len('sub/z.bin'), await folder.files.len('sub/none'), await folder.files.len('none/z')], ['manifest.json', 10, undefined, undefined])
})

test('sources become addresses', () => {
  globalThis.location = { href: 'https://site.example/app/index.html' }
  for (const [source, address] of [
    ['owner/repo', 'https://huggingface.co/owner/repo'],
    ['https://huggingface.co/owner/repo/', 'https://huggingface.co/owner/repo'],
    ['https://x.example/m', 'https://x.example/m/'],
    ['https://x.example/m/manifest.json', 'https://x.example/m/'],
    ['https://x.example/m.gguf?download=1', 'https://x.example/m.gguf?download=1'],
    ['./models/tiny', 'https://site.example/app/models/tiny/'],
    ['models/tiny.gguf', 'https://site.example/app/models/tiny.gguf'],
    ['models/tiny/', 'https://site.example/app/models/tiny/'],
    ['/m', 'https://site.example/m/'],
    ['http://localhost:8765', 'http://localhost:8765/'],
  ]) assert.equal(addressOf(source), address)
  delete globalThis.location
  assert.throws(() => addressOf('./x'), { code: 'invalid_request' })
})

/** What `Sterna.convert` does in the Worker: a `File` that Node posts loses its name. */
function converted(source, { onProgress, onNotice, signal = new AbortController().signal, store = 'auto', name } = {}) {
  const emit = item => 'notice' in item ? onNotice?.(item.notice) : onProgress?.(item)
  return convert(fake, { source: wireSource(source).source, store, ...(name === undefined ? {} : { name }) }, { signal, emit })
}

test('a file of the user\'s becomes a stored model', async () => {
  const file = new File([bytes(700_000)], 'Mine.gguf', { lastModified: 1 })
  const [progress, notices] = [[], []]
  const stored = await converted(file, { onProgress: p => progress.push(p), onNotice: n => notices.push(n.code) })
  assert.deepEqual(progress.at(-1), { phase: 'convert', doneBytes: 700_000, totalBytes: 700_000 })
  assert.deepEqual(notices, ['conversion'])
  assert.match(stored.id, /^Mine-[0-9a-f]{16}$/)
  assert.deepEqual([stored.source, stored.name, stored.complete, stored.store], [stored.id, 'Mine-wfake', true, 'indexeddb'])
  assert.deepEqual(await Sterna.models.list(), [stored])
  // Again is no work.
  progress.length = 0
  assert.equal((await converted(file, { onProgress: p => progress.push(p) })).id, stored.id)
  assert.deepEqual(progress, [])
  const plan = await Sterna.plan(stored.id)
  assert.deepEqual([plan.missingBytes, plan.fits, plan.totalBytes], [0, true, stored.totalBytes])
  const model = await Sterna.load(stored.id)
  assert.equal(model.info.name, 'Mine')
  await assert.rejects(Sterna.models.remove(stored.id), { code: 'busy' })
  await model.dispose()
  assert.deepEqual(await Sterna.models.verify(stored.id), [])
  const folder = await (await openStore('indexeddb')).folder(stored.id)
  const data = await readFile(folder, 'shard_00001.bin')
  data[9] ^= 4
  await writeFile(folder, 'shard_00001.bin', data)
  await assert.rejects(Sterna.load(stored.id, { verify: 'full' }), { code: 'hash_mismatch' })
  await assert.rejects(Sterna.load(stored.id), { code: 'not_found' })
  assert.equal((await Sterna.models.list())[0].complete, false)
  assert.equal((await converted(file)).complete, true)
  await writeFile(folder, 'shard_00000.bin', data)
  assert.deepEqual(await Sterna.models.verify(stored.id, { mend: true }), ['shard_00000.bin'])
  assert.equal(await Sterna.models.remove(stored.id), true)
  await assert.rejects(Sterna.load(stored.id), { code: 'not_found' })
  assert.equal((await converted(file, { name: 'other' })).name, 'other')
})

test('what stops a conversion leaves nothing of it', async () => {
  const file = new File([bytes(700_000)], 'mine.gguf')
  quota = 600_000
  await assert.rejects(converted(file), { code: 'quota' })
  quota = 1e9
  seen.stepMs = 5
  const controller = new AbortController()
  await assert.rejects(converted(file, { signal: controller.signal, onProgress: () => controller.abort() }), { code: 'cancelled' })
  await assert.rejects(converted(new File([bytes(10)], 'x.txt')), { code: 'invalid_file' })
  await assert.rejects(converted(site.url), { code: 'invalid_request' })
  await assert.rejects(Sterna.convert(site.url), { code: 'invalid_request' })
  await assert.rejects(converted(file, { name: '' }), { code: 'invalid_request' })
  await assert.rejects(converted(file, { store: 'memory' }), { code: 'unsupported' })
  assert.deepEqual(await Sterna.models.list(), [])
})

test('a model is loaded by the id of what was downloaded', async () => {
  await (await Sterna.load(site.url)).dispose()
  const [{ id }] = await Sterna.models.list()
  site.state.requests = []
  await (await Sterna.load(id)).dispose()
  assert.deepEqual(site.state.requests, ['/manifest.json'])
})

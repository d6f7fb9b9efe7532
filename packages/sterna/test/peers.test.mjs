// Tabs that share with tabs: connections are test/fake-rtc.mjs, the planner is the fake engine's.
import assert from 'node:assert/strict'
import { once } from 'node:events'
import { after, before, beforeEach, test } from 'node:test'
import { indexedDB, IDBKeyRange } from 'fake-indexeddb'
import { WebSocket, WebSocketServer } from 'ws'
import { Sterna, broadcastSignalling, webSocketSignalling } from '../dist/index.js'
import { Remote } from '../dist/rpc.js'
import { keyOf, understood } from '../dist/rtc.js'
import { takeFrom } from '../dist/take.js'
import { openStore, readFile, writeFile } from '../dist/worker/store.js'
import { keyOf as folderOf } from '../dist/worker/library.js'
import { bytes, makePackage, seen, serveFiles, useFakeEngine } from './helpers.mjs'
import { Channel, FakeConnection, connections } from './fake-rtc.mjs'
import { locks } from './locks.mjs'

const stored = new Map()
const localStorage = { getItem: key => stored.get(key) ?? null, setItem: (key, value) => stored.set(key, value) }
Object.defineProperty(globalThis, 'navigator', { configurable: true, value: { locks, storage: {} } })
Object.defineProperty(globalThis, 'localStorage', { configurable: true, value: localStorage })
Object.assign(globalThis, { indexedDB, IDBKeyRange, RTCPeerConnection: FakeConnection })
globalThis.WebSocket ??= WebSocket // Node.js 20 has none.

const signalling = broadcastSignalling()
const SIZES = [300_000, 200_000]
let site, files
before(async () => {
  files = makePackage(SIZES.map((size, i) => bytes(size, i + 1)))
  files['/x.gguf'] = bytes(1000)
  site = await serveFiles(files)
})
after(() => site.close())
const open = []
beforeEach(async () => {
  for (const sharing of open.splice(0)) await sharing.stop()
  useFakeEngine()
  stored.clear()
  await Sterna.models.purge()
  await (await openStore('memory')).remove(folderOf(site.url))
  await (await Sterna.load(site.url)).dispose()
  Object.assign(site.state, { requests: [] })
})
const share = async (options = {}) => {
  const sharing = await Sterna.share(site.url, { signalling, ...options })
  open.push(sharing)
  return sharing
}
after(async () => { for (const sharing of open) await sharing.stop() })

/** Loads the package into memory, with other tabs as sources; what was told. */
async function take(options = {}) {
  const told = { notices: [] }
  const model = await Sterna.load(site.url, {
    store: 'memory', peers: { signalling }, onNotice: notice => told.notices.push(notice),
    onProgress: ({ sources }) => { if (sources) told.sources = sources }, ...options,
  })
  await model.dispose()
  return told
}
const until = async condition => { while (!condition()) await new Promise(done => setTimeout(done, 5)) }
/** What takes 10 seconds or more takes a hundredth of that, until the test ends. */
function hurry(t) {
  const { setTimeout } = globalThis
  t.mock.method(globalThis, 'setTimeout', (then, ms, ...args) => setTimeout(then, ms >= 10_000 ? ms / 100 : ms, ...args))
}
const shardRequests = () => site.state.requests.filter(request => request.includes('shard'))

/** What ends the search, and then its port, which would keep this process. */
function end(ending, port) {
  ending.abort()
  setTimeout(() => port.close(), 100)
}

/** Asks as a Worker does: with a function that asks one peer, and one that ends it all. */
async function asker(manifest) {
  const port = takeFrom({ signalling }), remote = new Remote(port)
  const ending = new AbortController()
  const peer = await new Promise(resolve => {
    remote.call('find', { manifest }, { signal: ending.signal, onItem: ({ peer }) => resolve(peer) }).catch(() => {})
  })
  const ask = async (request, signal) => {
    const items = []
    await remote.call('ask', { peer, request: typeof request === 'string' ? request : JSON.stringify(request) }, { signal, onItem: item => items.push(item) })
    return { reply: items[0], bytes: Buffer.concat(items.slice(1)) }
  }
  return { ask, end: () => end(ending, port) }
}

test('a package comes from another tab, and bytes are counted by source', async () => {
  const sharing = await share()
  seen.awaitPeers = 1
  const { notices, sources } = await take()
  assert.deepEqual([notices, shardRequests()], [[], []])
  assert.equal(sources.length, 1)
  assert.match(sharing.key, /^[0-9a-f]{64}$/)
  assert.equal(sources[0].name, `peer ${sharing.key}`)
  assert.equal(sources[0].bytes, 500_000)
  assert.equal(sharing.sentBytes, 500_000)
  while (sharing.connections) await new Promise(done => setTimeout(done, 5)) // The other left.
})

test('a connection may open before its description is known to be set', async t => {
  const sharing = await share()
  const { setRemoteDescription } = FakeConnection.prototype
  t.mock.method(FakeConnection.prototype, 'setRemoteDescription', async function (description) {
    await setRemoteDescription.call(this, description)
    if (description.type !== 'answer') return
    await once(this.lasting, 'open')
    await new Promise(done => setTimeout(done, 10))
  })
  seen.awaitPeers = 1
  const { sources } = await take()
  assert.deepEqual(sources, [{ name: `peer ${sharing.key}`, bytes: 500_000 }])
})

test('nobody is asked, and no server of others, unless that is asked for', async () => {
  const sharing = await share()
  const servers = []
  class Watched extends FakeConnection {
    constructor(options) { super(options); servers.push(options.iceServers) }
  }
  globalThis.RTCPeerConnection = Watched
  const { sources } = await take({ peers: undefined })
  assert.deepEqual(sources.map(({ name }) => new URL(name).pathname), ['/shard_00000.bin', '/shard_00001.bin'])
  assert.deepEqual([sharing.connections, servers], [0, []])
  const { end } = await asker(sharing.manifest)
  globalThis.RTCPeerConnection = FakeConnection
  end()
  assert.deepEqual(servers, [[], []])
})

test('nothing is given that wasn\'t offered', async () => {
  const { manifest } = await share()
  const { ask, end } = await asker(manifest)
  const whole = await ask({ manifest, file: 'shard_00001.bin', start: 0 })
  assert.deepEqual(JSON.parse(whole.reply), { bytes: { size: 200_000 } })
  assert.ok(whole.bytes.equals(files['/shard_00001.bin']))
  const part = await ask({ manifest, file: 'shard_00001.bin', start: 100, end: 150 })
  assert.ok(part.bytes.equals(files['/shard_00001.bin'].subarray(100, 150)))
  for (const [request, reply] of [
    [{ manifest, file: '.record', start: 0 }, '"unknown"'],
    [{ manifest, file: '.seal/shard_00000.bin', start: 0 }, '"unknown"'],
    [{ manifest, file: '../x', start: 0 }, '"unknown"'],
    [{ manifest: '00'.repeat(32), file: 'shard_00000.bin', start: 0 }, '"unknown"'],
    [{ manifest, file: 'shard_00000.bin', start: 0, end: 300_001 }, '"invalid"'],
    [JSON.stringify({ manifest, file: 'x'.repeat(9000), start: 0 }), '"invalid"'],
  ]) {
    const answer = await ask(request)
    assert.deepEqual([answer.reply, answer.bytes.length], [reply, 0], JSON.stringify(request).slice(0, 100))
  }
  end()
})

test('a tab gives each other as much as it said, and all together', async () => {
  const { manifest } = await share({ bytesPerPeer: 1000, totalBytes: 1500 })
  const request = n => ({ manifest, file: 'shard_00000.bin', start: 0, end: n })
  const [one, other] = [await asker(manifest), await asker(manifest)]
  assert.equal((await one.ask(request(600))).bytes.length, 600)
  assert.equal((await one.ask(request(401))).reply, '"quota"')
  assert.equal((await one.ask(request(400))).bytes.length, 400)
  assert.equal((await other.ask(request(501))).reply, '"quota"')
  assert.equal((await other.ask(request(500))).bytes.length, 500)
  assert.equal((await other.ask(request(1))).reply, '"quota"')
  one.end()
  other.end()
  // Whoever gets none has it from elsewhere.
  seen.awaitPeers = 1
  const { notices } = await take()
  assert.deepEqual([notices, seen.replies, shardRequests().length], [[], ['"quota"', '"quota"'], 2])
})

test('bytes come at the rate that was said, and more requests than that are told to come again', async () => {
  const { manifest } = await share({ bytesPerSecond: 400_000, maxRequests: 1 })
  const { ask, end } = await asker(manifest)
  const began = performance.now()
  const slow = ask({ manifest, file: 'shard_00000.bin', start: 0, end: 200_000 })
  // Until the first is being answered.
  let busy
  do busy = await ask({ manifest, file: 'shard_00000.bin', start: 0, end: 1 })
  while (busy.reply !== '"busy"' && performance.now() < began + 60_000)
  assert.equal(busy.reply, '"busy"')
  assert.equal((await slow).bytes.length, 200_000)
  // The last piece begins when those before it have had their time.
  const ms = performance.now() - began
  assert.ok(ms >= 150_000 / 400_000 * 1000 - 20, `${ms} ms`)
  end()
})

test('only so many are connected', async () => {
  const sharing = await share({ maxConnections: 1 })
  const first = await asker(sharing.manifest)
  const port = takeFrom({ signalling }), remote = new Remote(port)
  const ending = new AbortController()
  let met = 0
  remote.call('find', { manifest: sharing.manifest }, { signal: ending.signal, onItem: () => met++ }).catch(() => {})
  await new Promise(done => setTimeout(done, 200))
  assert.deepEqual([met, sharing.connections], [0, 1])
  end(ending, port)
  first.end()
  await assert.rejects(share({ maxConnections: 0 }), { code: 'invalid_request' })
})

test('a liar is named, dropped, and remembered', async () => {
  await share()
  const folder = await (await openStore('indexeddb')).folder(folderOf(site.url))
  const data = await readFile(folder, 'shard_00001.bin')
  data[7] ^= 1
  await writeFile(folder, 'shard_00001.bin', data)
  seen.awaitPeers = 1
  const { notices, sources } = await take()
  assert.equal(notices.length, 1)
  const [{ code, message }] = notices
  assert.equal(code, 'false_bytes')
  assert.match(message, /^peer [0-9a-f]{64} is not asked any more: `shard_00001.bin`: expected [0-9a-f]{64}, found [0-9a-f]{64}$/)
  assert.deepEqual(sources.map(({ bytes }) => bytes), [500_000, 200_000])
  assert.equal(shardRequests().length, 1)
  const [{ peer, why, at }] = JSON.parse(stored.get('sterna:liars'))
  assert.ok(message.includes(peer) && message.includes(why) && at > 1.7e9)
  // The same tab isn't asked in a later load.
  await (await openStore('memory')).remove(folderOf(site.url))
  seen.awaitPeers = 0
  seen.replies = []
  site.state.requests = []
  site.state.msPerPiece = 5
  const later = await take()
  site.state.msPerPiece = 0
  assert.deepEqual([later.notices, seen.replies, shardRequests().length], [[], [], 2])
  // Damage that was there before is no lie that is told.
  await assert.rejects(share(), { code: 'hash_mismatch' })
})

test('a tab that goes is missed, and not waited for', async () => {
  const sharing = await share({ bytesPerSecond: 100_000 })
  const { manifest } = sharing
  const { ask, end } = await asker(manifest)
  const asked = ask({ manifest, file: 'shard_00000.bin', start: 0 })
  const lost = assert.rejects(asked, { code: 'io' })
  while (sharing.sentBytes === 0) await new Promise(done => setTimeout(done, 5))
  await sharing.stop()
  await lost
  await assert.rejects(ask({ manifest, file: 'shard_00000.bin', start: 0 }), { code: 'not_found' })
  end()
})

test('a tab that begins to share later is found, too', async () => {
  const { manifest } = await share()
  await open.pop().stop()
  const finding = asker(manifest)
  await new Promise(done => setTimeout(done, 50))
  await share()
  const { ask, end } = await finding
  assert.equal((await ask({ manifest, file: 'manifest.json', start: 0 })).bytes.length, files['/manifest.json'].length)
  end()
})

test('what is aborted while it begins is stopped', async () => {
  const aborting = new AbortController(), left = []
  const rooms = {
    async join(...args) {
      const room = await signalling.join(...args)
      aborting.abort()
      return { ...room, leave: () => left.push(room.leave()) }
    },
  }
  await assert.rejects(share({ signalling: rooms, signal: aborting.signal }), { code: 'cancelled', name: 'AbortError' })
  assert.equal(left.length, 1)
})

test('requests are given back where no channel is said to be closed', async t => {
  hurry(t)
  const sharing = await share({ maxRequests: 1 })
  const { manifest } = sharing
  const { ask, end } = await asker(manifest)
  const request = { manifest, file: 'shard_00000.bin', start: 0, end: 1 }
  const { close } = Channel.prototype
  Channel.prototype.close = () => {}
  assert.equal((await ask(request)).bytes.length, 1)
  let next
  do {
    await new Promise(done => setTimeout(done, 50)) // Not so often that there are too many channels.
    next = await ask(request)
  } while (next.reply === '"busy"')
  assert.equal(next.bytes.length, 1)
  Channel.prototype.close = close
  await sharing.stop()
  assert.equal(sharing.connections, 0)
  end()
})

test('channels that nothing comes of are closed, and so is a connection without any', async t => {
  const sharing = await share()
  const taking = []
  class Watched extends FakeConnection {
    constructor(options) { super(options); taking.push(this) }
  }
  globalThis.RTCPeerConnection = Watched
  const { ask, end } = await asker(sharing.manifest)
  globalThis.RTCPeerConnection = FakeConnection
  hurry(t)
  const open = () => taking[0].createDataChannel('', { protocol: 'sterna/package/1' })
  const began = performance.now()
  const closed = []
  for (let i = 0; i < 40; i++) open().onclose = () => closed.push(i)
  await until(() => closed.length === 40)
  assert.deepEqual(closed.slice(0, 8), [32, 33, 34, 35, 36, 37, 38, 39])
  assert.ok(performance.now() - began >= 99)
  const refused = open()
  refused.onopen = () => refused.send('{}')
  const [{ data }] = await once(refused, 'message')
  assert.equal(data, '"unknown"')
  const answered = performance.now()
  await once(refused, 'close')
  assert.ok(performance.now() - answered >= 200)
  assert.equal(sharing.connections, 1)
  await until(() => sharing.connections === 0)
  assert.ok(performance.now() - answered >= 700)
  let refusal // That it is closed is known here a little later, and what is asked meanwhile gets no answer.
  do { refusal = await ask({}).catch(error => error) } while (refusal.code === 'io')
  assert.equal(refusal.code, 'not_found')
  end()
})

test('a liar that can\'t be stored is remembered beside those that are', async () => {
  const { key, manifest } = await share()
  const port = takeFrom({ signalling }), remote = new Remote(port)
  stored.set('sterna:liars', '[{"peer":"00","why":"","at":1}]')
  const { setItem } = localStorage
  localStorage.setItem = () => { throw new DOMException('full', 'QuotaExceededError') }
  await remote.call('lied', { peer: key, why: 'x' })
  localStorage.setItem = setItem
  const ending = new AbortController()
  let met = 0
  remote.call('find', { manifest }, { signal: ending.signal, onItem: () => met++ }).catch(() => {})
  await new Promise(done => setTimeout(done, 200))
  assert.equal(met, 0)
  await remote.call('lied', { peer: '11', why: 'y' })
  assert.deepEqual(JSON.parse(stored.get('sterna:liars')).map(({ peer }) => peer), ['00', key, '11'])
  end(ending, port)
})

test('what can\'t be shared, or by nobody, says so', async () => {
  await assert.rejects(Sterna.share(`${site.url}none/`, { signalling }), { code: 'not_found' })
  await (await Sterna.load(`${site.url}x.gguf`)).dispose()
  await assert.rejects(Sterna.share(`${site.url}x.gguf`, { signalling }), { code: 'unsupported' })
  const notices = async (url, peers) => {
    const told = []
    await (await Sterna.load(url, { store: 'memory', peers, onNotice: ({ code, message }) => told.push([code, message]) })).dispose()
    return told
  }
  const [[code, message]] = await notices(`${site.url}x.gguf`, { signalling })
  assert.equal(code, 'no_peers')
  assert.match(message, /a single file/)
  const broken = { join: async () => { throw new Error('nobody here') } }
  site.state.msPerPiece = 5
  const [[code2, message2]] = await notices(site.url, { signalling: broken })
  site.state.msPerPiece = 0
  assert.equal(code2, 'no_peers')
  assert.match(message2, /nobody here/)
  await assert.rejects(share({ signalling: broken }), { code: 'io' })
})

test('descriptions and messages of strangers are read with care', () => {
  const digest = Array(32).fill('AB').join(':')
  const line = `a=fingerprint:sha-256 ${digest}\r\n`
  assert.equal(keyOf(`v=0\r\n${line}${line}`), 'ab'.repeat(32))
  for (const sdp of ['v=0\r\n', `${line}${line.replace('AB', 'AC')}`, line.replace('sha-256', 'sha-1'), 'a=fingerprint:sha-256 AB:CD\r\n']) assert.equal(keyOf(sdp), undefined, sdp)
  for (const message of [null, 'ask', 3, {}, { offer: 3 }, { offer: 'x'.repeat(20_000) }, { ask: 'yes' }]) assert.equal(understood(message), undefined)
  assert.deepEqual(understood({ offer: 'v=0', more: 1 }), { offer: 'v=0' })
})

test('a room of a server is joined, and joined again when the connection is lost', async () => {
  const server = new WebSocketServer({ port: 0, host: '127.0.0.1', handleProtocols: protocols => [...protocols][0] })
  await once(server, 'listening')
  const sockets = []
  server.on('connection', (socket, request) => {
    sockets.push({ socket, request })
    socket.send(JSON.stringify({ id: `m${sockets.length}` }))
  })
  const url = `http://127.0.0.1:${server.address().port}/some`
  const heard = []
  const room = await webSocketSignalling(url, { key: 'sk-ä' }).join('ab'.repeat(32), (...what) => heard.push(what))
  const { socket, request } = sockets[0]
  assert.equal(request.url, `/some/signal/${'ab'.repeat(32)}`)
  assert.equal(request.headers['sec-websocket-protocol'], `sterna-signal-1,sterna-key.${Buffer.from('sk-ä').toString('base64url')}`)
  const said = []
  socket.on('message', data => said.push(JSON.parse(data)))
  room.say({ ask: true })
  room.say({ offer: 'x' }, 'm2')
  while (said.length < 2) await new Promise(done => setTimeout(done, 5))
  assert.deepEqual(said, [{ message: { ask: true } }, { to: 'm2', message: { offer: 'x' } }])
  socket.send(JSON.stringify({ from: 'm2', message: { have: true } }))
  while (heard.length < 1) await new Promise(done => setTimeout(done, 5))
  assert.deepEqual(heard, [[{ have: true }, 'm2']])
  socket.close(1001, 'restart')
  while (sockets.length < 2) await new Promise(done => setTimeout(done, 20))
  room.leave()
  server.removeAllListeners('connection')
  server.on('connection', socket => socket.close(1013, 'the room is full'))
  await assert.rejects(webSocketSignalling(url).join('cd'.repeat(32), () => {}), error => error.code === 'io' && /1013, the room is full/.test(error.message))
  for (const client of server.clients) client.terminate()
  server.close()
})

test('who joins a room again is found, and so is who was connected before', async () => {
  const server = new WebSocketServer({ port: 0, host: '127.0.0.1' })
  await once(server, 'listening')
  const members = new Map()
  let n = 0, deaf = true
  server.on('connection', socket => {
    const id = `m${n++}`
    members.set(id, socket)
    socket.on('close', () => members.delete(id))
    socket.on('message', data => {
      const { to, message } = JSON.parse(data)
      if (!deaf) for (const [other, socket] of members) if (other !== id && (to ?? other) === other) socket.send(JSON.stringify({ from: id, message }))
    })
    socket.send(JSON.stringify({ id }))
  })
  const signalling = webSocketSignalling(`http://127.0.0.1:${server.address().port}/`)
  const sharing = await share({ signalling })
  const port = takeFrom({ signalling }), remote = new Remote(port)
  const ending = new AbortController()
  const found = []
  remote.call('find', { manifest: sharing.manifest }, { signal: ending.signal, onItem: ({ peer }) => found.push(peer) }).catch(() => {})
  await until(() => members.size === 2)
  await new Promise(done => setTimeout(done, 50))
  assert.deepEqual(found, [])
  deaf = false
  const lose = async id => {
    members.get(id).terminate()
    const before = n
    await until(() => n > before)
  }
  // Whoever wants it asks again; whoever has it says so again.
  await lose('m1')
  await until(() => found.length === 1)
  // Who is connected isn't connected to once more.
  await lose('m0')
  await new Promise(done => setTimeout(done, 50))
  assert.deepEqual(found, [sharing.key])
  for (const [count, id] of [[2, 'm2'], [3, 'm3']]) {
    connections.findLast(({ connectionState }) => connectionState === 'connected').close()
    await lose(id) // It is missed before they are back.
    await until(() => found.length === count)
  }
  assert.deepEqual(found, [sharing.key, sharing.key, sharing.key])
  end(ending, port)
  await sharing.stop()
  for (const client of server.clients) client.terminate()
  server.close()
})

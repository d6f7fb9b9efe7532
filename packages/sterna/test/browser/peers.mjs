// Tabs that share a package with tabs.
import assert from 'node:assert/strict'
import { existsSync } from 'node:fs'
import path from 'node:path'
import { serve } from './browser.mjs'
import { TALES } from './made.mjs'
import { browser, mounts, nativeIds, open, scratch, site, sterna, sternaServe } from './stage.mjs'

const PROMPT = 'Once upon a time'

/** A package of many shards, served as `/shared/`; its folder. */
function makeShared() {
  const folder = path.join(scratch, 'shared')
  if (!existsSync(folder)) sterna('convert', TALES, folder, '--shard-size', '128KiB', '--quiet')
  mounts['/shared/'] = folder
  return folder
}

/** A tab with the package in its store, which it shares. */
async function sharer(url, signalling, options = {}, before) {
  const page = await open(url, before)
  await page.evaluate(async () => (await Sterna.load('./shared/', { backend: 'cpu' })).dispose())
  const key = await page.evaluate(async ({ signalling, options }) => {
    globalThis.sharing = await Sterna.share('./shared/', { signalling: signallingBy(signalling), ...options })
    return sharing.key
  }, { signalling, options })
  return { page, key, sent: () => page.evaluate(() => sharing.sentBytes) }
}

/** In a page: how it finds others. And what connections it makes. */
function watch() {
  globalThis.signallingBy = server => server === undefined ? broadcastSignalling() : webSocketSignalling(server)
  globalThis.servers = []
  globalThis.RTCPeerConnection = class extends RTCPeerConnection {
    constructor(options) {
      super(options)
      servers.push(options?.iceServers?.length ?? 0)
    }
  }
}
/** The same in a tab that lies: of every piece that it sends a byte is flipped. */
function watchAndLie() {
  globalThis.signallingBy = server => webSocketSignalling(server)
  const { send } = RTCDataChannel.prototype
  RTCDataChannel.prototype.send = function (data) {
    if (typeof data === 'string') return send.call(this, data)
    const lie = new Uint8Array(data)
    lie[lie.length >> 1] ^= 1
    return send.call(this, lie)
  }
}

/** Begins to load the package, with other tabs as sources. */
const begin = (page, signalling, { together = 1, ...options } = {}) => page.evaluate(({ signalling, together, options }) => {
  globalThis.notices = []
  globalThis.sources = []
  const rooms = signallingBy(signalling)
  // What others say is heard when so many have spoken, so that none has given all before the last is met.
  const join = (room, heard) => {
    const told = new Map()
    return rooms.join(room, (message, from) => {
      if (told.size >= together) return heard(message, from)
      told.set(from, message)
      if (told.size === together) for (const [from, message] of told) heard(message, from)
    })
  }
  const peers = { signalling: { join } }
  const onProgress = progress => { if (progress.sources) sources = progress.sources }
  globalThis.loading = Sterna.load('./shared/', { backend: 'cpu', peers, onProgress, onNotice: notice => notices.push(notice), ...options })
  loading.catch(() => {})
}, { signalling, together, options })
const finish = (page, prompt) => page.evaluate(async prompt => {
  const model = await loading
  const { ids } = await tokensOf(model, prompt, 20)
  await model.dispose()
  return { ids, notices, sources, servers, models: await Sterna.models.list() }
}, prompt)

export const tests = {
  async 'a package comes whole from tabs of which one lies and one is closed, and a slow mirror'() {
    const folder = makeShared()
    const signalling = await sternaServe(folder, '--no-api', '--no-pages', '--signal', '--cors', '*')
    // An origin each, so that each has a store of its own.
    const origins = await Promise.all([1, 2, 3].map(() => serve(mounts)))
    try {
      const [honest, liar, leaver] = await Promise.all([
        sharer(origins[0].url, signalling, { bytesPerSecond: 150_000 }, watch),
        sharer(origins[1].url, signalling, {}, watchAndLie),
        sharer(origins[2].url, signalling, { bytesPerSecond: 20_000 }, watch),
      ])
      site.state.bytesPerSecond = path => path.startsWith('/shared/shard') ? 8192 : Infinity
      const page = await open(site.url, watch)
      await begin(page, signalling, { together: 3 })
      await leaver.page.waitForFunction(() => sharing.sentBytes > 100_000, undefined, { timeout: 120_000 })
      await leaver.page.close()
      await page.waitForFunction(key => notices.some(({ message }) => message.includes(key)), liar.key, { timeout: 120_000 })
      await page.waitForFunction(key => sources.some(({ name, bytes }) => name.includes(key) && bytes > 0), honest.key, { timeout: 120_000 })
      // What is left needn't take as long.
      site.state.bytesPerSecond = () => Infinity
      const { ids, notices, sources, servers, models } = await finish(page, PROMPT)
      for (const { name, bytes } of sources) console.log(`  ${(bytes / 1024).toFixed(1)} KiB from ${name}`)
      assert.deepEqual(ids, nativeIds(TALES, PROMPT, 20))
      assert.ok(models.every(({ complete }) => complete))
      assert.deepEqual(notices.map(({ code }) => code), ['false_bytes'])
      assert.match(notices[0].message, new RegExp(`^peer ${liar.key} is not asked any more: \`shard_\\d+\\.bin\`: .*expected .*, found `))
      const bytes = new Map(sources.map(({ name, bytes }) => [name, bytes]))
      assert.deepEqual([...bytes.keys()].sort(), [`${site.url}shared/`, ...[honest, liar, leaver].map(({ key }) => `peer ${key}`)].sort())
      for (const [name, n] of bytes) assert.ok(n > 0, `${n} bytes from ${name}`)
      const { totalBytes } = models[0]
      const received = [...bytes.values()].reduce((sum, n) => sum + n, 0)
      assert.ok(received >= 0.9 * totalBytes && received < 1.5 * totalBytes, `${received} of ${totalBytes}`)
      assert.ok(bytes.get(`peer ${honest.key}`) <= await honest.sent())
      assert.deepEqual([...new Set(servers)], [0])
      const [known] = await page.evaluate(() => JSON.parse(localStorage['sterna:liars']))
      assert.equal(known.peer, liar.key)
      assert.ok(notices[0].message.endsWith(known.why))
    } finally {
      for (const page of browser.pages()) await page.close().catch(() => {})
      for (const origin of origins) origin.close()
    }
  },

  async 'tabs of one origin find each other without a server, and only if they are asked to'() {
    makeShared()
    const { page: sharing, key } = await sharer(site.url, undefined, {}, watch)
    const page = await open(site.url, watch)
    const without = await page.evaluate(async () => {
      let last
      const onProgress = ({ sources }) => { if (sources) last = sources }
      await (await Sterna.load('./shared/', { store: 'memory', backend: 'cpu', onProgress })).dispose()
      return { sources: last.map(({ name }) => name), servers }
    })
    assert.deepEqual(without, { sources: [`${site.url}shared/`], servers: [] })
    assert.equal(await sharing.evaluate(() => sharing.connections), 0)
    site.state.bytesPerSecond = path => path.startsWith('/shared/shard') ? 8192 : Infinity
    await begin(page, undefined, { store: 'memory' })
    await page.waitForFunction(key => sources.some(({ name, bytes }) => name.includes(key) && bytes > 0), key, { timeout: 120_000 })
    site.state.bytesPerSecond = () => Infinity
    const { ids, notices, sources } = await finish(page, PROMPT)
    assert.deepEqual(ids, nativeIds(TALES, PROMPT, 20))
    assert.deepEqual(notices, [])
    assert.deepEqual(sources.map(({ name }) => name), [`${site.url}shared/`, `peer ${key}`])
    // The tab that took is gone, and what is stopped isn't found.
    await sharing.waitForFunction(() => sharing.connections === 0, undefined, { timeout: 60_000 })
    assert.equal(await sharing.evaluate(() => Sterna.models.remove('./shared/').catch(({ code }) => code)), 'busy')
    await sharing.evaluate(() => sharing.stop())
    assert.equal(await sharing.evaluate(() => Sterna.models.remove('./shared/').catch(({ code }) => code)), true)
  },
}

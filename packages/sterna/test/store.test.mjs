import assert from 'node:assert/strict'
import { test } from 'node:test'
import { indexedDB, IDBKeyRange } from 'fake-indexeddb'
import { SealedFolder } from '../dist/worker/sealed.js'
import { openStore, readFile, writeFile } from '../dist/worker/store.js'
import { bytes } from './helpers.mjs'

Object.assign(globalThis, { indexedDB, IDBKeyRange })
const MIB = 1 << 20

for (const kind of ['memory', 'indexeddb']) {
  test(`${kind}: a file arrives in pieces of any size`, async () => {
    const store = await openStore(kind)
    assert.equal(store.kind, kind)
    const folder = await store.folder('pieces')
    const data = bytes(3 * MIB + 12345)
    // Out of order, over the edges of blocks.
    for (const [from, to] of [[MIB - 7, 2 * MIB + 9], [0, MIB - 7], [2 * MIB + 9, data.length]]) await folder.writeAt('a/b%c', from, data.subarray(from, to))
    assert.equal(await folder.len('a/b%c'), undefined)
    assert.equal(await folder.arrived('a/b%c'), data.length)
    assert.deepEqual(Buffer.from(await folder.readBack('a/b%c', 5, 10)), data.subarray(5, 10))
    assert.deepEqual(await folder.entries(), [])
    await folder.note('a/b%c', 'so far')
    assert.deepEqual(await folder.entries(), [{ name: 'a/b%c', size: data.length, complete: false }])
    await folder.commit('a/b%c')
    assert.equal(await folder.journal('a/b%c'), undefined)
    assert.deepEqual(Buffer.from(await readFile(folder, 'a/b%c')), data)
    assert.deepEqual(await folder.entries(), [{ name: 'a/b%c', size: data.length, complete: true }])
    assert.deepEqual(await store.keys(), ['pieces'])
    await store.remove('pieces')
    assert.deepEqual(await store.keys(), [])
  })

  test(`${kind}: what was noted is there for the next`, async () => {
    const store = await openStore(kind)
    const data = bytes(2 * MIB)
    const first = await store.folder('resumed')
    await first.writeAt('x', 0, data.subarray(0, MIB + 100))
    await first.note('x', '1048676')
    await first.writeAt('x', MIB + 100, data.subarray(MIB + 100, MIB + 200)) // Lost with the tab.
    const next = await (await openStore(kind)).folder('resumed')
    assert.equal(await next.journal('x'), '1048676')
    assert.equal(await next.arrived('x'), MIB + 100)
    await next.writeAt('x', MIB + 100, data.subarray(MIB + 100))
    await next.commit('x')
    assert.deepEqual(Buffer.from(await readFile(next, 'x')), data)
    await store.remove('resumed')
  })

  test(`${kind}: a new file replaces the old when it is committed`, async () => {
    const folder = await (await openStore(kind)).folder('replaced')
    await writeFile(folder, 'x', Buffer.from('old, and longer'))
    await folder.writeAt('x', 0, Buffer.from('new'))
    assert.equal(String(Buffer.from(await readFile(folder, 'x'))), 'old, and longer')
    await folder.commit('x')
    assert.equal(String(Buffer.from(await readFile(folder, 'x'))), 'new')
    await writeFile(folder, 'empty', new Uint8Array())
    assert.equal(await folder.len('empty'), 0)
    await folder.remove('x')
    assert.equal(await folder.len('x'), undefined)
    await assert.rejects(folder.read('x', 0, 1), { code: 'not_found' })
    await (await openStore(kind)).remove('replaced')
  })

  test(`${kind}: damage is found by a sample`, async () => {
    const inner = await (await openStore(kind)).folder('sealed')
    const folder = new SealedFolder(inner)
    const data = bytes(3 * MIB)
    for (const name of ['good', 'bad']) await writeFile(folder, name, data)
    assert.deepEqual(await folder.sample(), [])
    const damaged = Buffer.from(data)
    damaged[2 * MIB + 5] ^= 1
    await writeFile(inner, 'bad', damaged)
    assert.deepEqual(await folder.sample(), ['bad'])
    assert.equal(await folder.len('bad'), undefined)
    await writeFile(inner, 'good', data.subarray(0, MIB)) // Cut.
    assert.deepEqual(await folder.sample(), ['good'])
    assert.deepEqual(await folder.entries(), [])
    await (await openStore(kind)).remove('sealed')
  })
}

test('a store that is missing is refused', async () => {
  await assert.rejects(openStore('opfs'), { code: 'unsupported' })
  assert.equal((await openStore('auto')).kind, 'indexeddb')
})

for (const kind of ['memory', 'indexeddb']) {
  test(`${kind}: parts of a file arrive at the same time`, async () => {
    const folder = new SealedFolder(await (await openStore(kind)).folder('parallel'), () => '00'.repeat(32))
    const data = bytes(12 * MIB)
    await Promise.all([0, 1, 2].map(async part => {
      const end = (part + 1) * 4 * MIB
      for (let at = part * 4 * MIB; at < end; at += 100_000) {
        await folder.writeAt('x', at, data.subarray(at, Math.min(end, at + 100_000)))
        if (at / 100_000 % 10 < 1) await folder.note('x', String(at))
      }
    }))
    await folder.commit('x')
    assert.deepEqual(Buffer.from(await readFile(folder, 'x')), data)
  })
}

// Downloads, what is stored of them, and sources that aren't downloaded.
import assert from 'node:assert/strict'
import { createHash } from 'node:crypto'
import { writeFileSync } from 'node:fs'
import path from 'node:path'
import { wideTales } from './made.mjs'
import { browser, fake, files, MIB, N_TOKENS, open, reference, scratch, serveAsPackage, sentOf, site, until } from './stage.mjs'

/** Changes one byte of a stored file. */
const flip = (page, name) => page.evaluate(async name => {
  const models = await (await navigator.storage.getDirectory()).getDirectoryHandle('sterna')
  for await (const folder of models.values()) {
    const handle = await folder.getFileHandle(name).catch(() => undefined)
    if (!handle) continue
    const file = await handle.getFile(), position = file.size - 10
    const [byte] = new Uint8Array(await file.slice(position, position + 1).arrayBuffer())
    const writer = await handle.createWritable({ keepExistingData: true })
    await writer.write({ type: 'write', position, data: Uint8Array.of(byte ^ 1) })
    await writer.close()
    return true
  }
}, name)

export const tests = {
  async 'a package is loaded, kept, and loaded again without its server'() {
    const page = await open()
    const first = await page.evaluate(async () => {
      const model = await Sterna.load('./package/')
      const answer = await tokensOf(model, 'one two', 5)
      await model.dispose()
      return { answer, models: await Sterna.models.list(), usage: await Sterna.models.usage() }
    })
    assert.ok(first.models[0].complete)
    assert.ok(first.usage.modelBytes > 0)
    await page.close()
    site.state.silent = path => path.startsWith('/package')
    const again = await open()
    const second = await again.evaluate(async () => {
      const model = await Sterna.load('./package/')
      const answer = await tokensOf(model, 'one two', 5)
      await model.dispose()
      return answer
    })
    assert.deepEqual(second, first.answer)
  },

  async 'a killed tab continues its download'() {
    const page = await open()
    site.state.bytesPerSecond = path => path === '/big.gguf' ? 4 * MIB : Infinity
    page.evaluate(() => Sterna.load('./big.gguf')).catch(() => {})
    await until(() => sentOf('/big.gguf') > 3.5 * MIB)
    const crash = await browser.newCDPSession(page)
    crash.send('Page.crash').catch(() => {})
    await page.waitForEvent('crash')
    await page.close()
    const before = sentOf('/big.gguf')
    const next = await open()
    await next.evaluate(async () => (await Sterna.load('./big.gguf')).dispose())
    const again = sentOf('/big.gguf') - files['/big.gguf'].length
    console.log(`  ${(before / MIB).toFixed(2)} MiB sent before the crash, ${(again / MIB).toFixed(2)} MiB sent twice`)
    assert.ok(again < 2 * MIB) // A block, and what was under way.
  },

  async 'an aborted load ends at once and continues'() {
    const page = await open()
    site.state.bytesPerSecond = path => path === '/big.gguf' ? 4 * MIB : Infinity
    const { code, ms } = await page.evaluate(async () => {
      const controller = new AbortController()
      let at
      const onProgress = ({ doneBytes }) => { if (doneBytes > 2e6 && !at) at = performance.now(), controller.abort() }
      const error = await Sterna.load('./big.gguf', { signal: controller.signal, onProgress }).catch(error => error)
      return { code: error.code, ms: performance.now() - at }
    })
    assert.equal(code, 'cancelled')
    assert.ok(ms < 1000, `${ms} ms`)
    const before = sentOf('/big.gguf')
    await page.evaluate(async () => (await Sterna.load('./big.gguf')).dispose())
    const again = sentOf('/big.gguf') - files['/big.gguf'].length
    console.log(`  ${(before / MIB).toFixed(2)} MiB sent before the abort, ${(again / MIB).toFixed(2)} MiB sent twice`)
    assert.ok(again < 2 * MIB) // A block, and what was under way.
  },

  async 'a flipped byte is found and mended'() {
    const page = await open()
    await page.evaluate(async () => (await Sterna.load('./package/')).dispose())
    assert.ok(await flip(page, 'shard_00001.bin'))
    assert.deepEqual(await page.evaluate(() => Sterna.models.verify('./package/', { mend: true })), ['shard_00001.bin'])
    assert.deepEqual(await page.evaluate(() => Sterna.models.verify('./package/')), [])
    assert.ok(await flip(page, 'shard_00000.bin'))
    const notices = await page.evaluate(async () => {
      const notices = []
      const model = await Sterna.load('./package/', { verify: 'full', onNotice: ({ code }) => notices.push(code) })
      await model.dispose()
      return notices
    })
    assert.deepEqual(notices, ['damaged_file'])
    assert.deepEqual(await page.evaluate(() => Sterna.models.verify('./package/')), [])
  },

  async 'two tabs make one download and share the files'() {
    const [a, b] = [await open(), await open()]
    site.state.bytesPerSecond = path => path.startsWith('/big') ? 8 * MIB : Infinity
    const load = page => page.evaluate(async () => {
      const phases = new Set()
      globalThis.model = await Sterna.load('./big.gguf', { onProgress: ({ phase }) => phases.add(phase) })
      return [...phases]
    })
    const phases = await Promise.all([load(a), load(b)])
    assert.equal(phases.filter(phases => phases.includes('waiting')).length, 1, JSON.stringify(phases))
    assert.ok(sentOf('/big.gguf') < files['/big.gguf'].length * 1.2)
    const answers = await Promise.all([a, b].map(page => page.evaluate(() => tokensOf(model, 'one two', 3))))
    assert.deepEqual(answers[0], answers[1])
    assert.equal(await a.evaluate(() => Sterna.models.remove('./big.gguf').catch(({ code }) => code)), 'busy')
    await Promise.all([a, b].map(page => page.evaluate(() => model.dispose())))
    assert.equal(await a.evaluate(() => Sterna.models.remove('./big.gguf')), true)
  },

  async 'a tab takes over the download of one that is closed'() {
    const [a, b] = [await open(), await open()]
    site.state.bytesPerSecond = path => path.startsWith('/big') ? 4 * MIB : Infinity
    a.evaluate(() => Sterna.load('./big.gguf')).catch(() => {})
    await until(() => sentOf('/big.gguf') > 2 * MIB)
    const load = b.evaluate(async () => (await Sterna.load('./big.gguf')).dispose())
    await until(() => sentOf('/big.gguf') > 3 * MIB)
    await a.close()
    await load
    const again = sentOf('/big.gguf') - files['/big.gguf'].length
    console.log(`  ${(again / MIB).toFixed(2)} MiB sent twice`)
    assert.ok(again < 2 * MIB)
  },

  async 'a file of the user\'s is read where it is'() {
    const page = await open()
    const file = path.join(scratch, 'mine.gguf')
    writeFileSync(file, files['/tiny.gguf'])
    await page.setInputFiles('input', file)
    const { answer, models } = await page.evaluate(async ({ prompt, n }) => {
      const model = await Sterna.load(document.querySelector('input').files[0], { backend: 'cpu' })
      const answer = await tokensOf(model, prompt, n)
      await model.dispose()
      return { answer, models: await Sterna.models.list() }
    }, { prompt: reference[0].prompt, n: N_TOKENS })
    assert.equal(answer.text, reference[0].text)
    assert.deepEqual(models, [])
  },

  async 'a directory handle is read where it is'() {
    const page = await open()
    const text = await page.evaluate(async names => {
      const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle('mine', { create: true })
      for (const name of names) {
        const writer = await (await folder.getFileHandle(name, { create: true })).createWritable()
        await writer.write(await (await fetch(`./package/${name}`)).arrayBuffer())
        await writer.close()
      }
      const model = await Sterna.load(folder)
      const { text } = await tokensOf(model, 'one two', 3)
      await model.dispose()
      return text
    }, Object.keys(files).filter(name => name.startsWith('/package/')).map(name => name.slice('/package/'.length)))
    assert.notEqual(text, '')
  },

  async 'IndexedDB and memory serve where OPFS can\'t'() {
    const page = await open()
    for (const store of ['indexeddb', 'memory']) {
      const { text, stores } = await page.evaluate(async store => {
        const model = await Sterna.load('./package/', { store })
        const { text } = await tokensOf(model, 'one two', 3)
        await model.dispose()
        return { text, stores: (await Sterna.models.list()).map(({ store, complete }) => [store, complete]) }
      }, store)
      assert.notEqual(text, '')
      assert.deepEqual(stores, [['indexeddb', true]])
    }
  },

  async 'a stored repository is used where nobody answers'() {
    const file = files['/tiny.gguf']
    const sha256 = createHash('sha256').update(file).digest('hex')
    const listing = { sha: '0123456789abcdef0123456789abcdef01234567', siblings: [{ rfilename: 'tiny.gguf', size: file.length, lfs: { sha256, size: file.length } }] }
    let online = true
    await browser.route('https://huggingface.co/**', (route, request) => {
      if (!online) return route.abort('internetdisconnected')
      const headers = { 'Access-Control-Allow-Origin': '*', 'Access-Control-Expose-Headers': '*', 'Access-Control-Allow-Headers': '*' }
      if (request.url().includes('/api/')) return route.fulfill({ headers, json: listing })
      const [, from = 0, to = file.length - 1] = /^bytes=(\d+)-(\d+)?/.exec(request.headers().range ?? '') ?? []
      const body = file.subarray(Number(from), Number(to) + 1)
      return route.fulfill({ status: 206, body, headers: { ...headers, 'Content-Range': `bytes ${from}-${Number(from) + body.length - 1}/${file.length}` } })
    })
    try {
      const page = await open()
      const load = () => page.evaluate(async ([prompt, n]) => {
        const notices = []
        const model = await Sterna.load('owner/repo', { onNotice: ({ code }) => notices.push(code) })
        const { text } = await tokensOf(model, prompt, n)
        await model.dispose()
        return { text, notices }
      }, [reference[0].prompt, Math.min(N_TOKENS, 20)])
      const before = await load()
      online = false
      const after = await load()
      assert.deepEqual([before.notices, after.notices], [[], ['offline']])
      assert.equal(after.text, before.text)
    } finally {
      await browser.unroute('https://huggingface.co/**')
    }
  },

  async 'a large file arrives in several parts'() {
    if (fake) return
    serveAsPackage('wide', wideTales())
    const page = await open()
    for (const store of ['opfs', 'indexeddb']) {
      const damaged = await page.evaluate(async store => {
        await (await Sterna.load('./wide/', { store, backend: 'cpu' })).dispose()
        const damaged = await Sterna.models.verify('./wide/')
        await Sterna.models.purge()
        return damaged
      }, store)
      assert.deepEqual(damaged, [])
    }
  },
}

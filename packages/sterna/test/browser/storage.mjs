// Downloads, what is stored of them, and sources that aren't downloaded.
import assert from 'node:assert/strict'
import { createHash } from 'node:crypto'
import { cpSync, readFileSync, readdirSync, writeFileSync } from 'node:fs'
import path from 'node:path'
import { TALES, wideTales } from './made.mjs'
import { browser, fake, files, MIB, mounts, N_TOKENS, open, reference, scratch, serveAsPackage, sentOf, site, sterna } from './stage.mjs'

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

/**
 * Begins a load of which the server holds back all but `held` bytes, until those have arrived: what is fetched again
 * is then what wasn't stored, whatever the network holds.
 */
const begin = async (page, url, held) => {
  await page.evaluate(url => void Sterna.load(url, { onProgress: ({ doneBytes }) => { globalThis.doneBytes = doneBytes } }).catch(() => {}), url)
  await page.waitForFunction(held => globalThis.doneBytes >= held, held)
}

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
    site.state.holdAt = path => path === '/big.gguf' ? 3.5 * MIB : Infinity
    await begin(page, './big.gguf', 3.5 * MIB)
    const crash = await browser.newCDPSession(page)
    crash.send('Page.crash').catch(() => {})
    await page.waitForEvent('crash')
    await page.close()
    const before = sentOf('/big.gguf')
    site.state.holdAt = () => Infinity
    const next = await open()
    await next.evaluate(async () => (await Sterna.load('./big.gguf')).dispose())
    const again = sentOf('/big.gguf') - files['/big.gguf'].length
    console.log(`  ${(before / MIB).toFixed(2)} MiB sent before the crash, ${(again / MIB).toFixed(2)} MiB sent twice`)
    assert.ok(again <= MIB) // A block.
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
    site.state.holdAt = path => path.startsWith('/big') ? 3 * MIB : Infinity
    await begin(a, './big.gguf', 3 * MIB)
    const load = b.evaluate(async () => {
      const model = await Sterna.load('./big.gguf', { onProgress: ({ phase }) => { globalThis.phase = phase } })
      await model.dispose()
    })
    await b.waitForFunction(() => globalThis.phase === 'waiting')
    await a.close()
    site.state.holdAt = () => Infinity
    await load
    const again = sentOf('/big.gguf') - files['/big.gguf'].length
    console.log(`  ${(again / MIB).toFixed(2)} MiB sent twice`)
    assert.ok(again <= MIB) // A block.
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

  async 'a dropped GGUF file is converted as the native program does, and runs offline'() {
    const file = path.join(scratch, 'dropped.gguf')
    writeFileSync(file, files['/tiny.gguf'])
    const page = await open()
    const convert = (page, store) => page.evaluate(async store => {
      const phases = new Set(), notices = []
      const stored = await Sterna.convert(document.querySelector('input').files[0], {
        store, onProgress: ({ phase, doneBytes, totalBytes }) => { phases.add(phase); if (doneBytes > totalBytes) throw new Error('too far') },
        onNotice: ({ message }) => notices.push(message),
      })
      // What was written, as the browser has it.
      const hashes = {}
      if (store === 'opfs') {
        const folder = await (await (await navigator.storage.getDirectory()).getDirectoryHandle('sterna')).getDirectoryHandle(stored.id)
        for await (const [name, handle] of folder.entries()) {
          if (name.startsWith('.')) continue
          const digest = await crypto.subtle.digest('SHA-256', await (await handle.getFile()).arrayBuffer())
          hashes[name] = Array.from(new Uint8Array(digest), byte => byte.toString(16).padStart(2, '0')).join('')
        }
      }
      return { stored, hashes, phases: [...phases], notices }
    }, store)
    for (const store of ['opfs', 'indexeddb']) {
      await page.setInputFiles('input', file)
      const { stored, hashes, phases, notices } = await convert(page, store)
      assert.deepEqual([stored.complete, stored.store, stored.source, phases], [true, store, stored.id, ['convert']])
      if (!fake && store === 'opfs') {
        assert.deepEqual(notices, [])
        const out = path.join(scratch, 'converted')
        sterna('convert', file, out, '--quiet')
        const native = Object.fromEntries(readdirSync(out).map(name => [name, createHash('sha256').update(readFileSync(path.join(out, name))).digest('hex')]))
        assert.deepEqual(hashes, native)
        assert.equal(stored.name, JSON.parse(readFileSync(path.join(out, 'manifest.json'))).modelId)
      }
      // Another page, which has no file; nobody answers but for the package's scripts.
      site.state.silent = path => !path.startsWith('/pkg/') && path !== '/'
      const next = await open()
      const { text, damaged, removed, left } = await next.evaluate(async ({ id, prompt, n }) => {
        const model = await Sterna.load(id, { backend: 'cpu', verify: 'full' })
        const { text } = await tokensOf(model, prompt, n)
        await model.dispose()
        const damaged = await Sterna.models.verify(id)
        return { text, damaged, removed: await Sterna.models.remove(id), left: await Sterna.models.list() }
      }, { id: stored.id, prompt: reference[0].prompt, n: N_TOKENS })
      assert.equal(text, reference[0].text)
      assert.deepEqual([damaged, removed, left], [[], true, []])
      await next.close()
    }
  },

  async 'an aborted conversion leaves nothing, and a wrong file is refused'() {
    const page = await open()
    const [large, wrong] = ['large.gguf', 'wrong.gguf'].map(name => path.join(scratch, name))
    writeFileSync(large, files['/big.gguf'])
    writeFileSync(wrong, fake ? '' : files['/big.gguf'].subarray(0, 1000))
    await page.setInputFiles('input', [large, wrong])
    const seen = await page.evaluate(async () => {
      const [large, wrong] = document.querySelector('input').files
      const controller = new AbortController()
      const aborted = await Sterna.convert(large, { signal: controller.signal, onProgress: () => controller.abort() }).catch(({ code }) => code)
      const refused = await Sterna.convert(wrong).catch(({ code, message }) => [code, message])
      const models = await (await navigator.storage.getDirectory()).getDirectoryHandle('sterna')
      const folders = []
      for await (const name of models.keys()) folders.push(name)
      return { aborted, refused, folders, models: await Sterna.models.list() }
    })
    console.log(`  ${seen.refused}`)
    assert.deepEqual([seen.aborted, seen.refused[0]], ['cancelled', 'invalid_file'])
    assert.deepEqual([seen.models, seen.folders], [[], []])
  },

  async 'a checkpoint\'s folder is converted'() {
    if (fake) return
    const page = await open()
    const names = readdirSync(TALES).filter(name => /\.(json|safetensors)$/.test(name))
    for (const name of names) mounts[`/tales/${name}`] = readFileSync(path.join(TALES, name))
    const { name, manifest, text } = await page.evaluate(async names => {
      const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle('mine', { create: true })
      for (const name of names) {
        const writer = await (await folder.getFileHandle(name, { create: true })).createWritable()
        await writer.write(await (await fetch(`./tales/${name}`)).arrayBuffer())
        await writer.close()
      }
      const { id, name } = await Sterna.convert(folder, { name: 'tales' })
      const model = await Sterna.load(id, { backend: 'cpu' })
      const { text } = await tokensOf(model, 'Once upon a time', 8)
      await model.dispose()
      const stored = await (await (await navigator.storage.getDirectory()).getDirectoryHandle('sterna')).getDirectoryHandle(id)
      return { name, text, manifest: await (await (await stored.getFileHandle('manifest.json')).getFile()).text() }
    }, names)
    assert.equal(name, 'tales')
    assert.notEqual(text, '')
    const [mine, out] = [path.join(scratch, 'mine'), path.join(scratch, 'tales')]
    cpSync(TALES, mine, { recursive: true })
    sterna('convert', mine, out, '--id', 'tales', '--quiet')
    assert.equal(manifest, readFileSync(path.join(out, 'manifest.json'), 'utf8'))
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

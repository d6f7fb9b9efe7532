// The package in a real browser: node test/browser/run.mjs [--fake] [NAME…]
//
// With the engine in dist/wasm, models of ../../testdata; with --fake the engine of test/fake-engine.mjs and
// files made here, which tries the storage, the locks and the Worker. Names choose tests that contain one.
import assert from 'node:assert/strict'
import { cpSync, copyFileSync, existsSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs'
import os from 'node:os'
import path from 'node:path'
import { fileURLToPath } from 'node:url'
import { executable, openBrowser, serve } from './browser.mjs'
import { bytes, makePackage } from '../helpers.mjs'

const root = fileURLToPath(new URL('../..', import.meta.url))
const testdata = path.join(root, '../../testdata')
const fake = process.argv.includes('--fake')
const only = process.argv.slice(2).filter(arg => !arg.startsWith('--'))
const skip = why => { console.log(`SKIPPED: ${why}`); process.exit(0) }
if (!executable) skip('no Chromium (apt-get install chromium, or set CHROMIUM)')
if (!existsSync(path.join(root, 'dist/index.js'))) skip('no dist (npm run build)')
if (!fake && !existsSync(path.join(root, 'dist/wasm/sterna_web_bg.wasm'))) skip('no engine in dist/wasm (scripts/build-web.sh), and no --fake')

let dist = path.join(root, 'dist')
if (fake) {
  dist = path.join(root, 'test/browser/dist-fake')
  rmSync(dist, { recursive: true, force: true })
  cpSync(path.join(root, 'dist'), dist, { recursive: true, filter: file => !/dist\/wasm/.test(file) })
  mkdirSync(path.join(dist, 'wasm'))
  copyFileSync(path.join(root, 'test/fake-engine.mjs'), path.join(dist, 'wasm/sterna_web.js'))
}

// What is loaded, and what it must say.
const MIB = 1 << 20
const files = fake
  ? { ...prefixed('/package', makePackage([bytes(MIB, 1), bytes(2 * MIB, 2), bytes(3 * MIB, 3)])), '/tiny.gguf': bytes(6 * MIB), '/big.gguf': bytes(6 * MIB) }
  : {
      ...prefixed('/package', Object.fromEntries(readdirSync(path.join(testdata, 'rdrr-samples/tiny-llama-f16')).map(name => [`/${name}`, readFileSync(path.join(testdata, 'rdrr-samples/tiny-llama-f16', name))]))),
      '/tiny.gguf': readFileSync(path.join(testdata, 'bitllama-3M/bitllama-3M-tq2_0.gguf')),
      '/big.gguf': readFileSync(path.join(testdata, 'bitllama-3M/bitllama-3M-f16.gguf')),
    }
// native.json: sterna run bitllama-3M-tq2_0.gguf -p PROMPT --raw --temperature 0 --max-tokens 160
const reference = fake ? [{ prompt: 'one two three', text: 'three0 two1 one2 .' }] : JSON.parse(readFileSync(new URL('native.json', import.meta.url)))
const N_TOKENS = fake ? 3 : 160
function prefixed(prefix, files) { return Object.fromEntries(Object.entries(files).map(([name, data]) => [prefix + name, data])) }

const PAGE = `<!doctype html><meta charset=utf-8><title>test</title><link rel=icon href=data:,>
<script type=importmap>{"imports":{"sterna":"/pkg/index.js","doppler":"/pkg/doppler.js","0xbitnet":"/pkg/bitnet.js"}}</script>
<input type=file><script type=module>
import * as api from 'sterna'
Object.assign(globalThis, api)
globalThis.tokensOf = async (model, prompt, maxTokens) => {
  const generation = model.generate(prompt, { maxTokens, temperature: 0, logprobs: 0 })
  const text = await generation.text()
  return { text, ids: generation.logprobs.map(({ id }) => id), usage: generation.usage }
}
globalThis.ready = true
</script>`
const mounts = { '/pkg/': dist, '/': Buffer.from(PAGE), ...files }
const [site, isolated, cdn] = [await serve(mounts), await serve(mounts, { isolate: true }), await serve(mounts)]
const storage = mkdtempSync(path.join(os.tmpdir(), 'sterna-browser-'))
let browser = await openBrowser(storage)

async function open(url = site.url) {
  const page = await browser.newPage()
  page.on('pageerror', error => console.log(`  page: ${error.message}`))
  page.on('console', message => { if (message.type() === 'error') console.log(`  console: ${message.text()}`) })
  await page.goto(url)
  await page.waitForFunction(() => globalThis.ready)
  return page
}
const sentOf = name => Object.entries(site.state.sent).reduce((sum, [path, n]) => sum + (path.startsWith(name) ? n : 0), 0)
const until = async done => { while (!done()) await new Promise(next => setTimeout(next, 10)) }
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

const tests = {
  async 'answers of a GGUF file are those of the native program'() {
    const page = await open()
    for (const backend of ['cpu', 'auto']) {
      const { texts, info, store, ms } = await page.evaluate(async ({ reference, backend, n }) => {
        const model = await Sterna.load('./tiny.gguf', { backend })
        const started = performance.now()
        const texts = []
        for (const { prompt } of reference) texts.push((await tokensOf(model, prompt, n)).text)
        const ms = performance.now() - started
        const { store } = (await Sterna.models.list())[0]
        await model.dispose()
        return { texts, info: model.info, store, ms }
      }, { reference, backend, n: N_TOKENS })
      console.log(`  ${backend}: ${info.backend} ${JSON.stringify(info.backendReason ?? info.adapter)}, ${Math.round(reference.length * N_TOKENS / ms * 1000)} tokens/s`)
      assert.equal(store, 'opfs')
      assert.deepEqual(texts, reference.map(({ text }) => text))
    }
  },

  async 'a GPU that is asked for gives the native answers'() {
    const page = await open()
    const { info, text, error } = await page.evaluate(async ({ prompt }) => {
      try {
        const model = await Sterna.load('./tiny.gguf', { backend: 'gpu' })
        const { text } = await tokensOf(model, prompt, 6)
        await model.dispose()
        return { info: model.info, text }
      } catch ({ code, message }) {
        return { error: { code, message } }
      }
    }, reference[0])
    console.log(`  ${error ? JSON.stringify(error) : `${info.backend} ${info.adapter}: ${text}`}`)
    if (fake) return
    if (error?.code === 'not_found') return console.log('  SKIPPED: this browser has no WebGPU adapter')
    assert.equal(error, undefined)
    assert.ok(info.backend === 'gpu' && text !== '' && reference[0].text.startsWith(text))
  },

  async 'answers match their schema, on whatever computes'() {
    if (fake) return
    const page = await open()
    const { texts, free, refused, timing } = await page.evaluate(async ({ prompt }) => {
      const person = {
        type: 'object', properties: { name: { type: 'string', maxLength: 12 }, age: { type: 'integer', minimum: 0, maximum: 99 } },
        required: ['name', 'age'], additionalProperties: false,
      }
      const model = await Sterna.load('./tiny.gguf', { backend: 'cpu' })
      const begun = performance.now()
      await model.generate(prompt, { schema: { regex: 'x' } }).text()
      const first = performance.now() - begun
      const asked = [person, { enum: ['red', 7] }, { regex: '[1-9][0-9]?' }, { grammar: 'start: ("- " /[a-z]{2,5}/ "\\n"){2}' }]
      // At once, with a free one among them.
      const answers = await Promise.all([undefined, ...asked].flatMap(schema => [{ temperature: 0 }, { temperature: 1, seed: 3 }].map(async sampling => {
        const generation = model.generate(prompt, { ...sampling, maxTokens: schema ? 200 : 20, ...(schema === undefined ? {} : { schema }) })
        return [schema === undefined, await generation.text(), generation.reason]
      })))
      const alone = await model.generate(prompt, { temperature: 0, maxTokens: 20 }).text()
      const refused = await model.generate(prompt, { schema: { type: 'objekt' } }).text().catch(({ code, message }) => ({ code, message }))
      const { choices: [{ message }] } = await model.chat.completions.create({ messages: [{ role: 'user', content: prompt }], response_format: { type: 'json_schema', json_schema: { name: 'p', schema: person } } })
      const time = async options => {
        const begun = performance.now()
        const generation = model.generate(prompt, { temperature: 0, maxTokens: 64, ...options })
        await generation.text()
        return (performance.now() - begun) / generation.usage.completionTokens
      }
      const timing = { first, free: await time({}), constrained: await time({ schema: { regex: '[a-zA-Z ,.]{400}' } }) }
      await model.dispose()
      return { texts: [...answers.filter(([free]) => !free), [false, message.content, 'stop']], free: [answers[0][1], alone], refused, timing }
    }, reference[0])
    console.log(`  first ${timing.first.toFixed(0)} ms; ms a token: ${timing.free.toFixed(2)} free, ${timing.constrained.toFixed(2)} constrained`)
    assert.equal(free[0], free[1])
    assert.deepEqual([refused.code, /\/type/.test(refused.message)], ['invalid_request', true])
    const isPerson = text => { const { name, age } = JSON.parse(text); return typeof name === 'string' && Number.isInteger(age) }
    const holds = [isPerson, text => ['red', 7].includes(JSON.parse(text)), text => /^[1-9][0-9]?$/.test(text), text => /^(- [a-z]{2,5}\n){2}$/.test(text)]
    texts.forEach(([, text, reason], i) => assert.ok(reason === 'stop' && (holds[i >> 1] ?? isPerson)(text), `${i}: ${reason}: ${text}`))
  },

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
    const file = path.join(storage, 'mine.gguf')
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

  async 'an answer is aborted, and the next one is right'() {
    const page = await open()
    const seen = await page.evaluate(async () => {
      const model = await Sterna.load('./tiny.gguf')
      const before = await tokensOf(model, 'one two three', 3)
      const controller = new AbortController()
      let error
      try {
        for await (const _ of model.generate('one two', { maxTokens: 400, signal: controller.signal })) controller.abort()
      } catch (thrown) { error = thrown.code }
      const after = await tokensOf(model, 'one two three', 3)
      await model.dispose()
      return { before: before.ids, after: after.ids, error }
    })
    assert.deepEqual(seen.after, seen.before)
    assert.equal(seen.error, 'cancelled')
  },

  async 'fifty chats take no more memory than two'() {
    const page = await open()
    const sizes = await page.evaluate(async () => {
      const model = await Sterna.load('./tiny.gguf')
      const sizes = []
      for (let i = 0; i < 50; i++) {
        const chat = model.chat()
        await chat.send(`question ${i}`, { maxTokens: 4 }).text()
        await chat.close()
        sizes.push(await model.memory())
      }
      await model.dispose()
      return sizes
    })
    const { wasmBytes, gpuBytes } = sizes.at(-1)
    console.log(`  after 1, 2, 10, 25, 50 chats: ${[0, 1, 9, 24, 49].map(i => JSON.stringify(sizes[i])).join(' ')}`)
    assert.equal(gpuBytes, sizes[1].gpuBytes)
    // A few pages for what the allocator leaves between blocks; each chat's cache is larger than that.
    assert.ok(wasmBytes - sizes[1].wasmBytes <= 4 * 65536)
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

  async 'threads where the page is isolated'() {
    const page = await open(isolated.url)
    const { info, doctor } = await page.evaluate(async () => {
      const model = await Sterna.load('./tiny.gguf', { backend: 'cpu', threads: 2 })
      const { info } = model
      await model.dispose()
      return { info, doctor: await Sterna.doctor() }
    })
    console.log(`  ${info.threads} threads; ${doctor.webgpu.ok ? doctor.webgpu.adapter : doctor.webgpu.reason.message}; shared reads: ${doctor.storage.sharedReads}`)
    assert.equal(doctor.crossOriginIsolated, true)
    assert.ok(doctor.engine.ok && doctor.storage.opfs && doctor.storage.locks)
    if (!fake && existsSync(path.join(dist, 'wasm-threads/sterna_web_bg.wasm'))) assert.equal(info.threads, 2)
  },

  async 'the package comes from another origin'() {
    const page = await open()
    const name = await page.evaluate(async url => {
      const { Sterna } = await import(`${url}pkg/index.js`)
      const model = await Sterna.load('./tiny.gguf')
      await model.dispose()
      return model.info.name
    }, cdn.url)
    assert.equal(name, 'tiny')
  },

  async 'the page is not blocked'() {
    const page = await open()
    const { tasks, gap } = await page.evaluate(async () => {
      const tasks = []
      new PerformanceObserver(list => tasks.push(...list.getEntries().map(({ duration }) => duration))).observe({ type: 'longtask' })
      let gap = 0, last = performance.now()
      const beat = setInterval(() => {
        const now = performance.now()
        gap = Math.max(gap, now - last - 4)
        last = now
      }, 4)
      const model = await Sterna.load('./package/')
      await model.generate('one two three', { maxTokens: 64 }).text()
      clearInterval(beat)
      await model.dispose()
      return { tasks, gap }
    })
    console.log(`  longest delay of a timer of the page: ${gap.toFixed(1)} ms; tasks over 50 ms: ${tasks.length}`)
    // Other programs on the machine delay the page too.
    if (process.env.STERNA_TIMED) assert.deepEqual(tasks, [])
  },

  async 'the documents\' examples run as written'() {
    const page = await open()
    const text = await page.evaluate(async () => {
      const { downloadModel, parseManifest, createPipeline } = await import('doppler')
      await downloadModel(new URL('./package', location.href))
      const manifest = await loadManifestFromOPFS()
      const pipeline = await createPipeline(parseManifest(manifest))
      let text = ''
      for await (const token of pipeline.generate('Hello', { maxTokens: 5 })) text += token
      await pipeline.dispose()
      const { BitNet } = await import('0xbitnet')
      const bitnet = await BitNet.load('./tiny.gguf')
      for await (const token of bitnet.generate('Hello', { maxTokens: 5 })) text += token
      bitnet.dispose()
      return text
    })
    assert.notEqual(text, '')
  },
}

let failed = 0
for (const [name, test] of Object.entries(tests)) {
  if (only.length && !only.some(part => name.includes(part))) continue
  Object.assign(site.state, { requests: [], sent: {}, silent: () => false, bytesPerSecond: () => Infinity })
  const started = performance.now()
  let timer
  try {
    await Promise.race([test(), new Promise((_, reject) => { timer = setTimeout(() => reject(new Error('took longer than two minutes')), 120_000) })])
    console.log(`ok      ${name} (${Math.round(performance.now() - started)} ms)`)
  } catch (error) {
    failed++
    console.log(`FAILED  ${name}\n${error.stack}`)
  }
  clearTimeout(timer)
  for (const page of browser.pages()) await page.close().catch(() => {})
  browser.pages().length || await browser.newPage()
  const page = await open()
  await page.evaluate(async () => { await Sterna.models.purge(); await (await navigator.storage.getDirectory()).removeEntry('mine', { recursive: true }).catch(() => {}) })
  await page.close()
}
await browser.close()
for (const server of [site, isolated, cdn]) server.close()
rmSync(storage, { recursive: true, force: true })
console.log(failed ? `${failed} failed` : 'all ok')
process.exitCode = failed ? 1 : 0

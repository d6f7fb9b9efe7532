// Answers, memory, threads, and how the package is used.
import assert from 'node:assert/strict'
import { cdn, fake, isolated, N_TOKENS, open, reference, site } from './stage.mjs'

export const tests = {
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

  async 'the beginning of a prompt is computed while the weights arrive'() {
    if (fake) return
    const page = await open()
    const { first, second, other, refused } = await page.evaluate(async ({ prompt, n }) => {
      const options = { backend: 'cpu', store: 'memory', bytesPerSecond: 2e6 }
      const model = await Sterna.load('./tiny.gguf', { ...options, prefill: prompt, contextLength: 600 })
      const first = await tokensOf(model, prompt, n)
      await model.dispose()
      // What was computed is the beginning of something else; and a chat has another context.
      const again = await Sterna.load('./tiny.gguf', { ...options, prefill: `${prompt} and so on` })
      const second = await tokensOf(again, prompt, n)
      const chat = again.chat({ contextLength: 700 })
      await chat.close()
      const other = await tokensOf(again, prompt, n)
      await again.dispose()
      const refused = await Sterna.load('./tiny.gguf', { ...options, prefill: 7 }).catch(({ code }) => code)
      return { first, second, other, refused }
    }, { prompt: reference[0].prompt, n: N_TOKENS })
    for (const { text } of [first, second, other]) assert.equal(text, reference[0].text)
    const { promptTokens, cachedTokens } = first.usage
    assert.equal(cachedTokens, promptTokens - 1)
    assert.ok(second.usage.cachedTokens > 0 && second.usage.cachedTokens < promptTokens)
    assert.equal(refused, 'invalid_request')
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

  async 'threads where the page is isolated give the native answers'() {
    const page = await open(isolated.url)
    const { info, texts, doctor, ms } = await page.evaluate(async ({ reference, n }) => {
      const model = await Sterna.load('./tiny.gguf', { backend: 'cpu', threads: 2 })
      const started = performance.now()
      const texts = []
      for (const { prompt } of reference) texts.push((await tokensOf(model, prompt, n)).text)
      const ms = performance.now() - started
      const { info } = model
      await model.dispose()
      return { info, texts, doctor: await Sterna.doctor(), ms }
    }, { reference, n: N_TOKENS })
    console.log(`  ${info.threads} threads, ${Math.round(reference.length * N_TOKENS / ms * 1000)} tokens/s; ${doctor.webgpu.ok ? doctor.webgpu.adapter : doctor.webgpu.reason.message}; shared reads: ${doctor.storage.sharedReads}`)
    assert.equal(doctor.crossOriginIsolated, true)
    assert.ok(doctor.engine.ok && doctor.storage.opfs && doctor.storage.locks)
    assert.deepEqual(texts, reference.map(({ text }) => text))
    if (!fake) assert.equal(info.threads, 2)
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

  async 'a policy against the Worker of another origin is told, and workerUrl helps'() {
    const page = await open(`${site.url}strict.html`)
    const { error, name } = await page.evaluate(async url => {
      const { Sterna } = await import(`${url}pkg/index.js`)
      const { code, message } = await Sterna.load('./tiny.gguf').catch(error => error)
      const model = await Sterna.load('./tiny.gguf', { workerUrl: './pkg/worker/main.js' })
      await model.dispose()
      return { error: { code, message }, name: model.info.name }
    }, cdn.url)
    assert.equal(error.code, 'worker_failed')
    assert.match(error.message, /worker-src blob:.*workerUrl/)
    assert.equal(name, 'tiny')
    const lost = await page.evaluate(() => Sterna.models.list({ workerUrl: './nowhere.js' }).catch(({ code, message }) => ({ code, message })))
    assert.equal(lost.code, 'worker_failed')
    assert.match(lost.message, /nowhere\.js/)
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

import assert from 'node:assert/strict'
import http from 'node:http'
import { after, before, beforeEach, test } from 'node:test'
import { indexedDB, IDBKeyRange } from 'fake-indexeddb'
import { Sterna, openai } from '../dist/index.js'
import { sterna } from '../dist/ai-sdk.js'
import { BitNet, GPUDeviceError, initGPU, listCachedModels, deleteCachedModel } from '../dist/bitnet.js'
import { bytes, makePackage, seen, serveFiles, useFakeEngine } from './helpers.mjs'

Object.assign(globalThis, { indexedDB, IDBKeyRange })
let site, model
before(async () => {
  site = await serveFiles(makePackage([bytes(100)]))
  useFakeEngine()
  model = await Sterna.load(site.url, { store: 'memory', name: 'tiny' })
})
after(async () => { await model.dispose(); site.close() })
const messages = [{ role: 'user', content: 'one two' }]
const all = async iterable => { const out = []; for await (const item of iterable) out.push(item); return out }

test('chat.completions in the tab', async () => {
  const whole = await model.chat.completions.create({ messages, logprobs: true, top_logprobs: 1 })
  assert.equal(whole.object, 'chat.completion')
  assert.equal(whole.model, 'tiny')
  assert.deepEqual(whole.choices[0].message, { role: 'assistant', content: 'two0 one1 .' })
  assert.equal(whole.choices[0].finish_reason, 'stop')
  assert.deepEqual(whole.choices[0].logprobs.content[0], { token: 'two0 ', logprob: -0.5, bytes: [116, 119, 111, 48, 32], top_logprobs: [{ token: '<s>', logprob: -1, bytes: [60, 115, 62] }] })
  assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + 2)

  const chunks = await all(await model.chat.completions.create({ messages, stream: true, max_tokens: 1, stream_options: { include_usage: true } }))
  assert.deepEqual(chunks[0].choices[0].delta, { role: 'assistant', content: '' })
  assert.equal(chunks.flatMap(({ choices }) => choices.map(({ delta }) => delta.content ?? '')).join(''), 'two0 .')
  assert.equal(chunks.at(-2).choices[0].finish_reason, 'length')
  assert.equal(chunks.at(-1).usage.completion_tokens, 1)
  await assert.rejects(model.chat.completions.create({ messages, n: 2 }), { code: 'unsupported' })
  await assert.rejects(model.chat.completions.create({ messages }, { signal: AbortSignal.abort() }), { code: 'cancelled' })
})

test('response formats are schemas', async () => {
  const schema = { type: 'object', properties: { a: { type: 'null' } } }
  const asked = async response_format => {
    await model.chat.completions.create({ messages, response_format })
    return seen.starts.at(-1).constraint?.text
  }
  assert.equal(await asked({ type: 'text' }), undefined)
  assert.equal(await asked({ type: 'json_object' }), '{"type":"object"}')
  assert.equal(await asked({ type: 'json_schema', json_schema: { name: 'x', strict: true, schema } }), JSON.stringify(schema))
  await assert.rejects(asked({ type: 'json_schema' }), { code: 'invalid_request' })
  await assert.rejects(asked({ type: 'xml' }), { code: 'unsupported' })
  const prompt = [{ role: 'user', content: 'one' }]
  const { warnings } = await sterna(model).doGenerate({ prompt, responseFormat: { type: 'json', schema } })
  assert.deepEqual([warnings, seen.starts.at(-1).constraint.text], [[], JSON.stringify(schema)])
  await sterna(model).doGenerate({ prompt, responseFormat: { type: 'json' } })
  assert.equal(seen.starts.at(-1).constraint.text, '{"type":"object"}')
})

test('chat.completions by a server, by the same call', async () => {
  let asked
  const server = http.createServer(async (request, response) => {
    const chunks = []
    for await (const chunk of request) chunks.push(chunk)
    asked = { url: request.url, key: request.headers.authorization, body: JSON.parse(Buffer.concat(chunks)) }
    if (asked.body.model === 'none') return response.writeHead(404, { 'Content-Type': 'application/json' }).end('{"error":{"message":"no such model","code":"not_found"}}')
    if (!asked.body.stream) return response.end(JSON.stringify({ object: 'chat.completion', choices: [{ message: { content: 'whole' } }] }))
    response.write(': comment\r\n\r\ndata: {"choices":[{"delta":{"content":"é"}}')
    setTimeout(() => response.end(']}\n\ndata: {"choices":[{"delta":{"content":"!"}}]}\n\ndata: [DONE]\n\n'), 10)
  })
  await new Promise(done => server.listen(0, '127.0.0.1', done))
  const url = `http://127.0.0.1:${server.address().port}`
  const client = openai(url, { apiKey: 'k' })
  assert.equal((await client.chat.completions.create({ messages, model: 'm' })).choices[0].message.content, 'whole')
  assert.deepEqual(asked, { url: '/v1/chat/completions', key: 'Bearer k', body: { messages, model: 'm' } })
  const chunks = await all(await Sterna.openai(`${url}/v1/`).chat.completions.create({ messages, stream: true }))
  assert.equal(chunks.map(({ choices }) => choices[0].delta.content).join(''), 'é!')
  await assert.rejects(client.chat.completions.create({ messages, model: 'none' }), error => error.code === 'server' && error.status === 404 && /no such model/.test(error.message))
  server.closeAllConnections()
  server.close()
})

test('a language model of the AI SDK', async () => {
  const prompt = [{ role: 'system', content: 'sys' }, { role: 'user', content: [{ type: 'text', text: 'one ' }, { type: 'text', text: 'two' }] }]
  const v3 = sterna(model)
  assert.equal(v3.specificationVersion, 'v3')
  const whole = await v3.doGenerate({ prompt, maxOutputTokens: 2 })
  assert.deepEqual(whole.content, [{ type: 'text', text: 'two0 one1 .' }])
  assert.deepEqual(whole.finishReason, { unified: 'length', raw: 'length' })
  assert.equal(whole.usage.outputTokens.total, 2)
  const parts = await all((await v3.doStream({ prompt })).stream)
  assert.deepEqual(parts.map(({ type }) => type), ['stream-start', 'text-start', ...Array(4).fill('text-delta'), 'text-end', 'finish'])
  const v2 = await sterna(model, { version: 'v2' }).doGenerate({ prompt, tools: [{}] })
  assert.equal(v2.finishReason, 'stop')
  assert.equal(v2.usage.totalTokens, v2.usage.inputTokens + v2.usage.outputTokens)
  assert.deepEqual(v2.warnings, [{ type: 'unsupported-setting', setting: 'tools' }])
  await assert.rejects(v3.doGenerate({ prompt: [{ role: 'user', content: [{ type: 'file' }] }] }), { code: 'unsupported' })
})

test('the first document\'s example', async () => {
  const { downloadModel, parseManifest, createPipeline, purgeOPFS } = await import('../dist/doppler.js')
  await downloadModel(site.url)
  const manifest = await loadManifestFromOPFS()
  const parsed = parseManifest(manifest)
  assert.equal(parsed.totalSize, 100)
  const pipeline = await createPipeline(parsed)
  assert.deepEqual(await all(pipeline.generate('Hello')), ['Hello0 ', '.'])
  await pipeline.dispose()
  const { shards, hashAlgorithm } = parseManifest({ shards: [{ fileName: 'a', blake3: 'x', size: 3 }, { filename: 'b', blake3: 'y', size: 4 }] })
  assert.equal(hashAlgorithm, 'blake3')
  assert.deepEqual(shards.map(({ filename, offset, hash, blake3 }) => [filename, offset, hash, blake3]), [['a', 0, 'x', 'x'], ['b', 3, 'y', 'y']])
  assert.throws(() => parseManifest('{'), { code: 'invalid_file' })
  assert.throws(() => parseManifest({}), { code: 'invalid_file' })
  assert.ok(await purgeOPFS() >= 0)
})

test('the third document\'s names', async () => {
  const phases = new Set()
  const bitnet = await BitNet.load(site.url, { onProgress: ({ phase, fraction }) => { phases.add(phase); assert.ok(fraction <= 1) } })
  const tokens = []
  assert.deepEqual(await all(bitnet.generate('Hello', { maxTokens: 1, onToken: token => tokens.push(token) })), ['Hello0 ', '.'])
  assert.equal(tokens.length, 2)
  assert.ok(phases.has('upload'))
  assert.deepEqual(await listCachedModels(), [site.url])
  bitnet.dispose()
  await new Promise(done => setTimeout(done, 50))
  await deleteCachedModel(site.url)
  assert.deepEqual(await listCachedModels(), [])
  await assert.rejects(initGPU(), GPUDeviceError)
})

import assert from 'node:assert/strict'
import { after, before, beforeEach, test } from 'node:test'
import { Sterna, SternaError, Generation } from '../dist/index.js'
import { bytes, makePackage, seen, serveFiles, useFakeEngine } from './helpers.mjs'

let site
before(async () => { site = await serveFiles({ ...makePackage([bytes(100)]), '/base.gguf': bytes(50), '/adapter.gguf': bytes(30) }) })
after(() => site.close())
beforeEach(useFakeEngine)
const load = options => Sterna.load(site.url, { store: 'memory', ...options })
const collect = async generation => { const pieces = []; for await (const piece of generation) pieces.push(piece); return pieces }

test('a text is continued in pieces, with usage', async () => {
  const model = await load()
  const generation = model.generate('one two three')
  assert.ok(generation instanceof Generation)
  assert.deepEqual(await collect(generation), ['three0 ', 'two1 ', 'one2 ', '.'])
  assert.deepEqual(generation.usage, { promptTokens: 3, cachedTokens: 0, completionTokens: 3 })
  assert.equal(generation.reason, 'stop')
  assert.equal(await generation.text(), 'three0 two1 one2 .')
  await model.dispose()
})

test('options arrive as the engine spells them', async () => {
  const model = await load()
  const generation = model.generate('a b', { maxTokens: 1, temperature: 0, topK: 3, topP: 0.9, minP: 0.1, repeatPenalty: 1.1, seed: 7, stop: 'x', logprobs: 2 })
  assert.equal(await generation.text(), 'b0 .')
  assert.equal(generation.reason, 'length')
  assert.deepEqual(seen.starts[0].options, { maxTokens: 1, temperature: 0, topK: 3, topP: 0.9, minP: 0.1, repeatPenalty: 1.1, seed: 7, stop: ['x'], logprobs: 2 })
  assert.equal(generation.logprobs.length, 1)
  assert.equal(generation.logprobs[0].text, 'b0 ')
  assert.equal(generation.logprobs[0].top.length, 2)
  await model.dispose()
})

test('a schema becomes a constraint, which the answer frees', async () => {
  const model = await load()
  const name = { type: 'object', properties: { name: { type: 'string' } } }
  for (const [schema, kind, text] of [
    [name, 'schema', JSON.stringify(name)], [true, 'schema', 'true'], [{ regex: 'yes|no' }, 'regex', 'yes|no'], [{ grammar: 'start: "a"' }, 'grammar', 'start: "a"'],
    // A schema with other keywords that is called so.
    [{ regex: 'a', type: 'string' }, 'schema', '{"regex":"a","type":"string"}'],
  ]) {
    await model.generate('a b', { schema }).text()
    const { constraint } = seen.starts.at(-1)
    assert.deepEqual([constraint.kind, constraint.text, constraint.freed], [kind, text, true])
  }
  // The module is loaded, and given the vocabulary, once.
  assert.equal(seen.vocabularies.length, 1)
  await assert.rejects(model.generate('a', { schema: { regex: '(' } }).text(), { code: 'invalid_request', message: /unclosed group/ })
  await assert.rejects(model.generate('a', { schema: { type: 'trap' } }).text(), { code: 'invalid_request', message: /more levels/ })
  for (const schema of [null, [], 'x', { regex: 1 }]) assert.throws(() => model.generate('a', { schema }), { code: 'invalid_request' })
  await model.generate('a').text()
  assert.equal(seen.starts.at(-1).constraint, undefined)
  await model.dispose()
})

test('an aborted answer rejects, and the next one works', async () => {
  const model = await load()
  seen.stepMs = 5
  const controller = new AbortController()
  const generation = model.generate('a b c', { maxTokens: 1000, signal: controller.signal })
  await assert.rejects(async () => {
    for await (const _ of generation) controller.abort()
  }, error => error instanceof SternaError && error.code === 'cancelled' && error.name === 'AbortError')
  await assert.rejects(generation.text(), { code: 'cancelled' })
  assert.equal(await model.generate('x').text(), 'x0 .')
  assert.equal(seen.cancels, 1)
  await model.dispose()
})

test('leaving the loop stops the answer without an error', async () => {
  const model = await load()
  seen.stepMs = 5
  const generation = model.generate('a b c', { maxTokens: 1000 })
  for await (const _ of generation) break
  assert.equal(generation.reason, 'stopped')
  assert.equal(await generation.text(), generation.partial)
  assert.equal(await model.generate('x').text(), 'x0 .')
  assert.equal(seen.cancels, 1)
  await model.dispose()
})

test('answers run together, and sessions don\'t grow in number', async () => {
  const model = await load()
  const texts = await Promise.all(['a', 'b', 'c'].map(text => model.generate(text).text()))
  assert.deepEqual(texts, ['a0 .', 'b0 .', 'c0 .'])
  await model.generate('d').text()
  await model.memory() // After the sessions are closed.
  assert.equal(seen.sessions.size, 1)
  await model.dispose()
  assert.equal(seen.freed, 1)
})

test('a failed answer has the engine\'s code, and others go on', async () => {
  const model = await load()
  const [good, bad] = [model.generate('a b'), model.generate('broken')]
  await assert.rejects(bad.text(), { code: 'compute', message: 'not finite' })
  assert.equal(await good.text(), 'b0 a1 .')
  await assert.rejects(model.generate('').text(), { code: 'invalid_request' })
  await model.dispose()
})

test('a chat keeps its session: send, regenerate, edit', async () => {
  const model = await load()
  const chat = model.chat({ system: 'short' })
  assert.equal(await chat.send('hi').text(), 'hi0 short1 .')
  assert.deepEqual(chat.messages.map(({ role }) => role), ['system', 'user', 'assistant'])
  const second = chat.send('more')
  await second.text()
  assert.ok(second.usage.cachedTokens > 2)
  assert.equal(seen.prompts.at(-1), '<system> short <user> hi <assistant> hi0 short1 . <user> more <assistant>')
  await chat.regenerate({ seed: 1 }).text()
  assert.equal(seen.prompts.at(-1), seen.prompts.at(-2))
  assert.equal(chat.messages.length, 5)
  await chat.edit(1, 'ho').text()
  assert.deepEqual(chat.messages.map(({ content }) => content), ['short', 'ho', 'ho0 short1 .'])
  assert.throws(() => chat.edit(2, 'x'), { code: 'invalid_request' })
  assert.equal(new Set(seen.starts.map(({ id }) => id)).size, 1)
  await chat.close()
  assert.throws(() => chat.send('x'), { code: 'disposed' })
  assert.equal(seen.sessions.size, 0)
  await model.dispose()
})

test('a chat can be stopped and asked again at once', async () => {
  const model = await load()
  seen.stepMs = 5
  const chat = model.chat()
  const answer = chat.send('a b', { maxTokens: 1000 })
  assert.throws(() => chat.send('too soon'), { code: 'invalid_request' })
  for await (const _ of answer) break
  assert.deepEqual(chat.messages.at(-1), { role: 'assistant', content: 'b0 ' })
  answer.stop()
  assert.equal(await chat.regenerate().text(), 'b0 a1 .')
  assert.equal(chat.messages.length, 2)
  const controller = new AbortController()
  const next = chat.send('c', { maxTokens: 1000, signal: controller.signal })
  controller.abort()
  await assert.rejects(next.text(), { code: 'cancelled' })
  assert.deepEqual(chat.messages.at(-1), { role: 'user', content: 'c' })
  await model.dispose()
})

test('a chat forgets its oldest turns when the context is full', async () => {
  const model = await load({ contextLength: 40 })
  const chat = model.chat({ system: 'sys' })
  const long = n => `${n} `.repeat(8).trim()
  let forgotten = 0
  for (let i = 0; i < 6; i++) {
    const answer = chat.send(long(i), { maxTokens: 4 })
    await answer.text()
    forgotten += answer.forgotten
  }
  assert.ok(forgotten > 0)
  assert.match(seen.prompts.at(-1), /^<system> sys <user> [45]/)
  const strict = model.chat({ forget: false, messages: Array.from({ length: 9 }, (_, i) => ({ role: i % 2 ? 'assistant' : 'user', content: long(i) })) })
  await assert.rejects(strict.send('x').text(), { code: 'context_full' })
  await model.dispose()
})

test('a model without a template continues the chat\'s text', async () => {
  const model = await Sterna.load(`${site.url}base.gguf`, { store: 'memory' })
  assert.equal(model.info.name, 'base')
  await model.chat().send('Once upon').text()
  assert.equal(seen.prompts.at(-1), 'Once upon')
  await model.dispose()
})

test('tokens, logits, adapters, groups, memory', async () => {
  const model = await load()
  const ids = await model.tokenize('a b a')
  assert.deepEqual(ids, [1, 2, 1])
  assert.equal(await model.detokenize(ids), 'a b a')
  assert.equal((await model.logits(ids)).length, 8)
  assert.equal((await model.logits(ids, { all: true })).length, 24)
  await model.adapters.add('pirate', `${site.url}adapter.gguf`, { store: 'memory' })
  await model.adapters.use('pirate')
  await model.generate('a').text()
  await model.generate('a').text()
  await model.generate('a', { adapters: [{ name: 'pirate', scale: 0.5 }] }).text()
  await model.adapters.remove('pirate')
  assert.deepEqual(await model.check({ receipt: 1 }, { adapters: ['pirate'] }), { ok: false, difference: '{"receipt":1} true [{"name":"pirate"}]', index: 3 })
  assert.deepEqual(seen.adapters.map(([what, , list]) => list ? `${what} ${list}` : what), [
    'add 30', 'use [{"name":"pirate"}]', 'use [{"name":"pirate","scale":0.5}]', 'remove',
  ])
  assert.deepEqual(await model.swap(`${site.url}`, { store: 'memory', groups: ['layer.0'] }), [{ group: 'layer.0', from: { version: '1' }, to: { version: '2' } }])
  assert.ok((await model.memory()).wasmBytes > 0)
  await model.dispose()
  await assert.rejects(model.tokenize('x'), { code: 'disposed' })
})

test('a lost device is told, and the answer goes on', async () => {
  const notices = []
  const model = await load({ onNotice: notice => notices.push(notice) })
  seen.lost = 'it went away'
  assert.equal(await model.generate('a').text(), 'a0 .')
  assert.deepEqual(notices, [{ code: 'device_lost', message: 'it went away' }])
  assert.ok(seen.recovered > 0)
  await model.dispose()
})

test('dispose ends a running answer', async () => {
  const model = await load()
  seen.stepMs = 5
  const generation = model.generate('a', { maxTokens: 1000 })
  await generation[Symbol.asyncIterator]().next()
  await model.dispose()
  await assert.rejects(generation.text(), { code: 'disposed' })
})

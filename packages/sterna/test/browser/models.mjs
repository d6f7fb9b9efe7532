// Models of every family, adapters and swapped groups, against the native program.
import assert from 'node:assert/strict'
import { existsSync, readdirSync } from 'node:fs'
import path from 'node:path'
import { changedTales, readSafetensors, TALES, talesAdapter } from './made.mjs'
import { all, nativeIds, open, scratch, serveAsPackage, skip, sterna, testdata } from './stage.mjs'

const words = (Type, { data }) => new Type(data.buffer.slice(data.byteOffset, data.byteOffset + data.length))
const best = row => row.reduce((best, value, id) => value > row[best] ? id : best, 0)
/** Mean squared error over mean square. */
const errorOf = (got, want) => got.reduce((sum, value, i) => sum + (value - want[i]) ** 2, 0) / want.reduce((sum, value) => sum + value ** 2, 0)
/** As the engine's own tests: float models add in another order; a rounding of activations flips now and then. */
const MAX_ERROR_FLOAT = 1e-7, MAX_ERROR_INT8 = 2e-3
/** Best tokens are compared where the native program is this sure. */
const SURE = 0.5

/** A prompt of the reference and what was chosen after it. */
function idsOf(folder) {
  const reference = readSafetensors(path.join(folder, 'reference.safetensors'))
  return [...words(Int32Array, reference.input_ids).slice(0, 12), ...words(Int32Array, reference.greedy_ids).slice(0, 4)]
}

function nativeLogits(model, ids) {
  const file = path.join(scratch, 'logits.safetensors')
  sterna('logits', model, '--ids', ids.join(), '-o', file, '--backend', 'cpu')
  return words(Float32Array, readSafetensors(file).logits)
}

async function agrees(name, backend, from = 'reference-logits') {
  const folder = path.join(testdata, from, name), file = path.join(folder, 'model.gguf')
  const model = existsSync(file) ? file : folder
  serveAsPackage(name, model)
  const ids = idsOf(folder), want = nativeLogits(model, ids)
  const page = await open()
  const seen = await page.evaluate(async ({ name, backend, ids }) => {
    try {
      const model = await Sterna.load(`./${name}/`, { backend })
      const logits = [...await model.logits(ids, { all: true })]
      await model.dispose()
      return { info: model.info, logits }
    } catch ({ code, message }) {
      return { code, message }
    }
  }, { name, backend, ids })
  if (seen.code === 'not_found' && backend === 'gpu') skip('this browser has no WebGPU adapter')
  assert.equal(seen.message, undefined)
  assert.equal(seen.info.backend, backend)
  const { logits: got, info } = seen, n = info.vocabulary
  const error = errorOf(got, want), difference = want.reduce((most, value, i) => Math.max(most, Math.abs(value - got[i])), 0)
  console.log(`  ${backend}: ${info.architecture}, error ${error.toExponential(1)}, largest difference ${difference.toExponential(1)}`)
  assert.equal(got.length, ids.length * n)
  assert.ok(error <= (/^bitnet|bitlinear|^bonsai2/.test(name) ? MAX_ERROR_INT8 : MAX_ERROR_FLOAT))
  for (let at = 0; at < want.length; at += n) {
    const row = want.subarray(at, at + n), id = best(row)
    const margin = row[id] - Math.max(...row.filter((_, i) => i !== id))
    if (margin > Math.max(SURE, 2 * difference)) assert.equal(best(got.slice(at, at + n)), id)
  }
}

const families = readdirSync(path.join(testdata, 'reference-logits'), { withFileTypes: true }).filter(entry => entry.isDirectory()).map(({ name }) => name)
/** Others differ from these in what a GPU doesn't see, and most of these in what native tests see as well. */
const ON_GPU = ['bitnet-packed', 'gemma2', 'qwen3', ...(all ? ['gemma3', 'llama', 'mistral-sliding', 'phi3', 'qwen2', 'smollm3'] : [])]

/** Of every kind of state, with gates, shared experts and sigmoids; browsers' compilers refuse what native ones take. */
const STATES_ON_GPU = ['falcon-h1', 'jamba', 'lfm2-moe', 'qwen3.5-moe', 'rwkv4', 'rwkv6', 'rwkv7']

const PROMPT = 'Once upon a time', N_TOKENS = 16

export const tests = {
  ...Object.fromEntries(families.map(name => [`logits of ${name} are those of the native program`, () => agrees(name, 'cpu')])),
  ...Object.fromEntries(ON_GPU.map(name => [`logits of ${name} on a GPU are those of the native program`, () => agrees(name, 'gpu')])),
  ...Object.fromEntries(STATES_ON_GPU.map(name => [`logits of ${name} on a GPU are those of the native program`, () => agrees(name, 'gpu', 'reference-states/hf')])),
  'logits of a rotated model on a GPU are those of the native program': () => agrees('bonsai2-pq2_0', 'gpu', 'reference-states/gguf'),

  async 'adapters are added, mixed and removed'() {
    const base = serveAsPackage('tales', TALES)
    const [a, b] = [talesAdapter('a', 1), talesAdapter('b', 2)]
    serveAsPackage('adapter-a', a)
    const ids = (...lora) => nativeIds(base, PROMPT, N_TOKENS, ...lora.flatMap(adapter => ['--lora', adapter]))
    const want = { none: ids(), a: ids(a), b: ids(b), mixed: ids(`${a}=0.5`, `${b}=-1.5`) }
    assert.equal(new Set(Object.values(want).map(String)).size, 4)
    const page = await open()
    await page.setInputFiles('input', readdirSync(b).map(name => path.join(b, name)))
    const { got, missing } = await page.evaluate(async ({ prompt, n }) => {
      const model = await Sterna.load('./tales/', { backend: 'cpu' })
      await model.adapters.add('a', './adapter-a/')
      await model.adapters.add('b', [...document.querySelector('input').files])
      // At the same time, each with its own.
      const ids = async adapters => (await tokensOf(model, prompt, n, { adapters })).ids
      const sets = { none: [], a: [{ name: 'a' }], b: [{ name: 'b' }], mixed: [{ name: 'a', scale: 0.5 }, { name: 'b', scale: -1.5 }] }
      const got = Object.fromEntries(await Promise.all(Object.entries(sets).map(async ([name, adapters]) => [name, await ids(adapters)])))
      await model.adapters.remove('a')
      const missing = await ids([{ name: 'a' }]).catch(({ code }) => code)
      await model.dispose()
      return { got, missing }
    }, { prompt: PROMPT, n: N_TOKENS })
    assert.deepEqual(got, want)
    assert.equal(missing, 'invalid_request')
  },

  async 'a session whose adapters change forgets what the others computed'() {
    const base = serveAsPackage('tales', TALES), adapter = talesAdapter('a', 1)
    serveAsPackage('adapter-a', adapter)
    const none = nativeIds(base, PROMPT, N_TOKENS), adapted = nativeIds(base, PROMPT, N_TOKENS, '--lora', adapter)
    const page = await open()
    const got = await page.evaluate(async ({ prompt, n }) => {
      const model = await Sterna.load('./tales/', { backend: 'cpu' })
      const ids = async () => (await tokensOf(model, prompt, n)).ids
      const got = [await ids()]
      await model.adapters.add('a', './adapter-a/')
      await model.adapters.use('a')
      got.push(await ids())
      await model.adapters.use()
      got.push(await ids())
      await model.dispose()
      return got
    }, { prompt: PROMPT, n: N_TOKENS })
    assert.deepEqual(got, [none, adapted, none])
  },

  async 'groups are swapped, there and back'() {
    const [old, changed] = [serveAsPackage('tales', TALES), serveAsPackage('changed', changedTales())]
    const want = [old, changed].map(folder => nativeIds(folder, PROMPT, N_TOKENS))
    assert.notDeepEqual(want[0], want[1])
    const page = await open()
    const seen = await page.evaluate(async ({ prompt, n }) => {
      const model = await Sterna.load('./tales/', { backend: 'cpu' })
      const answer = async () => (await tokensOf(model, prompt, n)).ids
      const before = await answer()
      const refused = await model.swap('./changed/', { groups: ['layer.99'] }).catch(({ code }) => code)
      const same = await model.swap('./tales/').catch(({ code }) => code)
      const unchanged = await answer()
      const all = await model.swap('./changed/')
      const after = await answer()
      const one = await model.swap('./tales/', { groups: ['layer.3'] })
      const back = await answer()
      await model.dispose()
      return { before, refused, same, unchanged, all, after, one, back }
    }, { prompt: PROMPT, n: N_TOKENS })
    assert.deepEqual([seen.before, seen.unchanged, seen.after, seen.back], [want[0], want[0], want[1], want[0]])
    assert.deepEqual([seen.refused, seen.same], ['invalid_request', 'invalid_request'])
    for (const swapped of [seen.all, seen.one]) assert.deepEqual(swapped.map(({ group }) => group), ['layer.3'])
    const [{ from, to }] = seen.all
    assert.ok(from.version === '1.0.0' && from.hash !== to.hash)
    assert.deepEqual(seen.one, [{ group: 'layer.3', from: to, to: from }])
  },

  async 'a swap waits for the answer that is in progress'() {
    const want = [serveAsPackage('tales', TALES), serveAsPackage('changed', changedTales())].map(folder => nativeIds(folder, PROMPT, N_TOKENS))
    const page = await open()
    const seen = await page.evaluate(async ({ prompt, n }) => {
      const model = await Sterna.load('./tales/', { backend: 'cpu' })
      // Stored, so that the swap begins at once; and an answer that doesn't end by itself.
      await (await Sterna.load('./changed/', { backend: 'cpu' })).dispose()
      const long = model.generate(prompt, { maxTokens: 480, temperature: 0, logitBias: { 1: -100, 2: -100 } })
      let swap, next
      for await (const _ of long) {
        swap ??= model.swap('./changed/').then(() => long.usage !== undefined)
        next ??= swap.then(() => tokensOf(model, prompt, n))
      }
      const { completionTokens } = long.usage
      return { completionTokens, reason: long.reason, late: await swap, next: (await next).ids }
    }, { prompt: PROMPT, n: N_TOKENS })
    assert.deepEqual(seen, { completionTokens: 480, reason: 'length', late: true, next: want[1] })
  },
}

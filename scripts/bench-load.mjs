// How long a model that arrives over the network takes to its first token in headless Chromium, with and without
// `prefill`, in turns; and the memory that loading takes.
//
//   node scripts/bench-load.mjs PACKAGE [--rate 20e6] [--prompt 500] [--backend cpu] [--turns 3]
//
// PACKAGE is a folder that `sterna convert` made; --rate is in bytes per second, what the server sends in all; --prompt is in words. Needs the npm package
// (scripts/build-web.sh; npm run build in packages/sterna). Prints a line of JSON for each way, with medians.
import { mkdtempSync, rmSync } from 'node:fs'
import os from 'node:os'
import path from 'node:path'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { openBrowser, serve } from '../packages/sterna/test/browser/browser.mjs'

const { values: options, positionals: [folder] } = parseArgs({
  allowPositionals: true,
  options: { rate: { type: 'string', default: '20e6' }, prompt: { type: 'string', default: '500' }, backend: { type: 'string', default: 'cpu' }, turns: { type: 'string', default: '3' } },
})
/** Files that are fetched at a time. */
const PARALLEL = 4
const at = name => fileURLToPath(new URL(`../packages/sterna/${name}`, import.meta.url))
const page = Buffer.from('<!doctype html><meta charset=utf-8><title>bench</title><link rel=icon href=data:,>')
const site = await serve({ '/pkg/': at('dist'), '/model/': path.resolve(folder), '/': page })
// What a server sends of each file: the package fetches several at a time.
site.state.bytesPerSecond = name => name.startsWith('/model/shard') ? Number(options.rate) / PARALLEL : Infinity
const scratch = mkdtempSync(path.join(os.tmpdir(), 'sterna-bench-'))
const browser = await openBrowser(scratch)
const prompt = Array.from({ length: Number(options.prompt) }, (_, i) => ['a', 'small', 'bird', 'flies', 'far'][i * 7 % 5]).join(' ')

/** Loads the model once, in a tab of its own. */
async function turn(prefill) {
  const tab = await browser.newPage()
  tab.on('pageerror', error => console.error(error.message))
  await tab.goto(site.url)
  const measured = await tab.evaluate(async ({ prompt, prefill, backend }) => {
    const { Sterna } = await import('/pkg/index.js')
    const started = performance.now()
    const model = await Sterna.load('./model/', { backend, store: 'opfs', contextLength: 1024, ...(prefill ? { prefill: prompt } : {}) })
    const loaded = performance.now()
    const { wasmBytes, gpuBytes } = await model.memory()
    const generation = model.generate(prompt, { maxTokens: 2, temperature: 0, logprobs: 0 })
    let first
    for await (const _ of generation) first ??= performance.now()
    const { promptTokens, cachedTokens } = generation.usage
    const { weightBytes } = model.info
    await model.dispose()
    await Sterna.models.purge()
    return { loadMs: loaded - started, answerMs: first - loaded, firstTokenMs: first - started, promptTokens, cachedTokens, weightBytes, wasmBytes, gpuBytes }
  }, { prompt, prefill, backend: options.backend })
  await tab.close()
  return measured
}

const ways = [false, true].map(prefill => ({ prefill, all: [] }))
for (let i = 0; i < Number(options.turns); i++) for (const way of ways) way.all.push(await turn(way.prefill))
const median = values => Math.round(values.toSorted((a, b) => a - b)[values.length >> 1])
for (const { prefill, all } of ways) {
  console.log(JSON.stringify({ prefill, ...Object.fromEntries(Object.keys(all[0]).map(key => [key, median(all.map(one => one[key]))])) }))
}
await browser.close()
site.close()
rmSync(scratch, { recursive: true, force: true })

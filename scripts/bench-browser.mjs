// Rates of the npm package on the CPU in headless Chromium, in turns with wllama if that is there.
//
//   node scripts/bench-browser.mjs MODEL.gguf [--threads 1,2] [--prompt 128] [--decode 32] [--turns 5] [--wllama FOLDER]
//
// Needs the package (scripts/build-web.sh; npm run build in packages/sterna). FOLDER is that of the npm package
// @wllama/wllama. Prints a line of JSON for each number of threads, with medians of tokens per second.
import { mkdtempSync, rmSync } from 'node:fs'
import os from 'node:os'
import path from 'node:path'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { openBrowser, serve } from '../packages/sterna/test/browser/browser.mjs'

const { values: options, positionals: [file] } = parseArgs({
  allowPositionals: true,
  options: { threads: { type: 'string', default: '1,2' }, prompt: { type: 'string', default: '128' }, decode: { type: 'string', default: '32' }, turns: { type: 'string', default: '5' }, wllama: { type: 'string' } },
})
const PAGE = '<!doctype html><meta charset=utf-8><title>bench</title><link rel=icon href=data:,><input type=file>'
const at = name => fileURLToPath(new URL(`../packages/sterna/${name}`, import.meta.url))
const site = await serve({ '/pkg/': at('dist'), '/': Buffer.from(PAGE), ...(options.wllama ? { '/wllama/': path.resolve(options.wllama, 'esm') } : {}) }, { isolate: true })
const scratch = mkdtempSync(path.join(os.tmpdir(), 'sterna-bench-'))
const browser = await openBrowser(scratch)
const [nPrompt, nDecode, nTurns] = [options.prompt, options.decode, options.turns].map(Number)
const median = values => values.toSorted((a, b) => a - b)[values.length >> 1]
const rate = value => Number(value.toFixed(2))

/** A page whose `turn(i)` computes a prompt and some tokens: how many of each, and how many milliseconds each took. */
async function open(engine, threads) {
  const page = await browser.newPage()
  page.on('pageerror', error => console.error(`${engine}: ${error.message}`))
  await page.goto(site.url)
  await page.setInputFiles('input', file)
  await page.evaluate(ENGINES[engine], threads)
  return page
}
const ENGINES = {
  async sterna(threads) {
    const { Sterna } = await import('/pkg/index.js')
    const model = await Sterna.load(document.querySelector('input').files[0], { backend: 'cpu', threads, contextLength: 512 })
    if (model.info.threads !== threads) throw new Error(`${model.info.threads} threads`)
    globalThis.turn = async (prompt, n) => {
      const started = performance.now()
      let first, last
      const generation = model.generate(prompt, { maxTokens: n + 1, temperature: 0, logprobs: 0 })
      for await (const _ of generation) first ??= last = performance.now(), last = performance.now()
      const { promptTokens, cachedTokens, completionTokens } = generation.usage
      return { pn: promptTokens - cachedTokens, pms: first - started, dn: completionTokens - 1, dms: last - first }
    }
  },
  async wllama(threads) {
    const { Wllama, LoggerWithoutDebug } = await import('/wllama/index.js')
    const wllama = new Wllama({ default: '/wllama/wasm/wllama.wasm' }, { suppressNativeLog: true, logger: LoggerWithoutDebug })
    await wllama.loadModel([document.querySelector('input').files[0]], { n_ctx: 512, n_batch: 512, n_ubatch: 512, n_threads: threads, n_gpu_layers: 0, n_parallel: 1, warmup: true })
    globalThis.turn = async (prompt, n) => {
      const { timings: t } = await wllama.createCompletion({ prompt, max_tokens: n + 1, temperature: 0, ignore_eos: true, cache_prompt: false, stream: false })
      return { pn: t.prompt_n, pms: t.prompt_ms, dn: t.predicted_n - 1, dms: t.predicted_ms }
    }
  },
}

for (const threads of options.threads.split(',').map(Number)) {
  const pages = {}
  for (const engine of ['sterna', ...(options.wllama ? ['wllama'] : [])]) pages[engine] = await open(engine, threads)
  const turns = Object.fromEntries(Object.keys(pages).map(engine => [engine, []]))
  for (let i = 0; i <= nTurns; i++) {
    // Another beginning each time, so that nothing is taken from a cache.
    const prompt = Array.from({ length: nPrompt }, (_, j) => ` ${'abcdefghijklmnopqrstuvwxyz'[(j * 7 + i * 3 + 1) % 26]}`).join('')
    for (const [engine, page] of Object.entries(pages)) {
      const turn = await page.evaluate(([prompt, n]) => globalThis.turn(prompt, n), [prompt, nDecode])
      if (i > 0) turns[engine].push(turn)
    }
  }
  const line = { threads, model: path.basename(file) }
  for (const [engine, of] of Object.entries(turns)) {
    line[engine] = { prefill: rate(median(of.map(t => t.pn / t.pms * 1000))), decode: rate(median(of.map(t => t.dn / t.dms * 1000))), tokens: [of[0].pn, of[0].dn] }
  }
  if (turns.wllama) line.ratio = { prefill: rate(line.sterna.prefill / line.wllama.prefill), decode: rate(line.sterna.decode / line.wllama.decode) }
  console.log(JSON.stringify(line))
  for (const page of Object.values(pages)) await page.close()
}
await browser.close()
site.close()
rmSync(scratch, { recursive: true, force: true })

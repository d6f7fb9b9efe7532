// Rates of the npm package's engine on WebGPU, through Dawn in Node.js, to compare with `sterna bench`.
//
//   node scripts/bench-dawn.mjs MODEL.gguf [--prompt 128] [--decode 64] [--turns 5] [--backend gpu|cpu] [--text PROMPT]
//
// Needs the engine (scripts/build-web.sh) and Dawn: DAWN names a folder with dawn.node, such as
// node_modules/webgpu/dist/linux-x64 of the npm package `webgpu`. FLAGS are Dawn's, separated by spaces.
// With --text the tokens that follow it are printed, and no rates.
import { closeSync, openSync, readFileSync, readSync, statSync } from 'node:fs'
import { createRequire } from 'node:module'
import path from 'node:path'
import { parseArgs } from 'node:util'

const { values: options, positionals: [file] } = parseArgs({
  allowPositionals: true,
  options: { prompt: { type: 'string', default: '128' }, decode: { type: 'string', default: '64' }, turns: { type: 'string', default: '5' }, backend: { type: 'string', default: 'gpu' }, text: { type: 'string' } },
})
let dawn
if (options.backend === 'gpu') {
  dawn = createRequire(import.meta.url)(path.resolve(process.env.DAWN ?? 'packages/sterna/node_modules/webgpu/dist/linux-x64', 'dawn.node'))
  Object.assign(globalThis, dawn.globals)
  const gpu = dawn.create((process.env.FLAGS ?? '').split(' ').filter(Boolean))
  Object.defineProperty(globalThis, 'navigator', { value: { gpu }, configurable: true })
}
const built = new URL('../packages/sterna/dist/wasm/', import.meta.url)
const { default: init, Model } = await import(new URL('sterna_web.js', built))
await init({ module_or_path: readFileSync(new URL('sterna_web_bg.wasm', built)) })

const handle = openSync(file)
const files = {
  len: name => name === path.basename(file) ? statSync(file).size : undefined,
  read(_, start, end) {
    const bytes = new Uint8Array(end - start)
    return bytes.subarray(0, readSync(handle, bytes, 0, bytes.length, start))
  },
}
const model = await Model.load(files, { name: file, entry: path.basename(file), backend: options.backend, threads: 1 }, () => {})
closeSync(handle)
const { backend, adapter, backendReason } = model.info()

/** Computes `ids`, then `n` tokens; milliseconds until the first and from there to the last. */
async function turn(ids, n) {
  const session = model.session()
  const started = performance.now()
  model.start(session, ids, { temperature: 0, repeatPenalty: 1, maxTokens: n })
  const tokens = []
  let first
  while (!model.isIdle()) {
    for (const event of await model.step()) {
      if (event.type !== 'token') continue
      first ??= performance.now()
      tokens.push(event.id)
    }
  }
  const decode = (performance.now() - first) / (tokens.length - 1)
  model.close(session)
  return { tokens, prefill: first - started, decode }
}

if (options.text !== undefined) {
  const { tokens } = await turn(model.encode(options.text), Number(options.decode))
  console.log(JSON.stringify({ backend, adapter, backendReason, tokens }))
} else {
  const median = values => values.toSorted((a, b) => a - b)[values.length >> 1]
  const ids = Uint32Array.from({ length: Number(options.prompt) }, (_, i) => 260 + i * 37 % 1000)
  await turn(ids, 4)
  const turns = []
  const { user, system } = process.cpuUsage()
  for (let i = 0; i < Number(options.turns); i++) turns.push(await turn(ids, Number(options.decode)))
  console.log(JSON.stringify({
    backend, adapter, backendReason,
    prefill: +(ids.length / median(turns.map(t => t.prefill)) * 1000).toFixed(1),
    decode: +(1000 / median(turns.map(t => t.decode))).toFixed(1),
    cpuMsPerToken: +((process.cpuUsage().user + process.cpuUsage().system - user - system) / 1000 / turns.reduce((n, { tokens }) => n + tokens.length, 0)).toFixed(3),
    tokens: turns[0].tokens.length,
  }))
}
process.exit(0)

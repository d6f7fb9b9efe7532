// What the tests share: models, their files, servers, a browser and its pages.
import { execFileSync, spawn } from 'node:child_process'
import { cpSync, copyFileSync, existsSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync } from 'node:fs'
import os from 'node:os'
import path from 'node:path'
import { fileURLToPath } from 'node:url'
import { openBrowser, serve } from './browser.mjs'
import { bytes, makePackage } from '../helpers.mjs'

export const root = fileURLToPath(new URL('../..', import.meta.url))
export const repository = path.join(root, '../..')
export const testdata = path.join(repository, 'testdata')
export const fake = process.argv.includes('--fake')
/** Whether what takes long runs, too. */
export const all = process.argv.includes('--all')
export const MIB = 1 << 20

/** Thrown by a test that can't run here. */
export class Skipped extends Error {}
export const skip = why => { throw new Skipped(why) }

export let dist = path.join(root, 'dist')
if (fake) {
  dist = path.join(root, 'test/browser/dist-fake')
  rmSync(dist, { recursive: true, force: true })
  cpSync(path.join(root, 'dist'), dist, { recursive: true, filter: file => !/dist\/wasm/.test(file) })
  mkdirSync(path.join(dist, 'wasm'))
  copyFileSync(path.join(root, 'test/fake-engine.mjs'), path.join(dist, 'wasm/sterna_web.js'))
}

/** Made files and other passing things. */
export const scratch = mkdtempSync(path.join(os.tmpdir(), 'sterna-browser-'))

/** The files of a folder, by the paths that they have below `prefix`. */
export const filesOf = (prefix, folder) => Object.fromEntries(readdirSync(folder).map(name => [`${prefix}/${name}`, readFileSync(path.join(folder, name))]))

// What is loaded, and what it must say.
export const files = fake
  ? {
      ...Object.fromEntries(Object.entries(makePackage([bytes(MIB, 1), bytes(2 * MIB, 2), bytes(3 * MIB, 3)])).map(([name, data]) => [`/package${name}`, data])),
      '/tiny.gguf': bytes(6 * MIB), '/big.gguf': bytes(6 * MIB),
    }
  : {
      ...filesOf('/package', path.join(testdata, 'rdrr-samples/tiny-llama-f16')),
      '/tiny.gguf': readFileSync(path.join(testdata, 'bitllama-3M/bitllama-3M-tq2_0.gguf')),
      '/big.gguf': readFileSync(path.join(testdata, 'bitllama-3M/bitllama-3M-f16.gguf')),
    }
// native.json: sterna run bitllama-3M-tq2_0.gguf -p PROMPT --raw --temperature 0 --max-tokens 160
export const reference = fake ? [{ prompt: 'one two three', text: 'three0 two1 one2 .' }] : JSON.parse(readFileSync(new URL('native.json', import.meta.url)))
export const N_TOKENS = fake ? 3 : 160

/** The native program, where it is there. */
const program = [process.env.STERNA, ...['debug', 'release'].map(profile => path.join(process.env.CARGO_TARGET_DIR ?? path.join(repository, 'target'), profile, 'sterna'))].find(file => file && existsSync(file))
/** Runs the native program; what it prints. */
export function sterna(...args) {
  if (!program) skip('no native program (cargo build -p sterna-cli, or set STERNA)')
  return execFileSync(program, args, { encoding: 'utf8', stdio: ['ignore', 'pipe', 'pipe'], env: { ...process.env, NO_COLOR: '1' } })
}
const servers = []
/** Starts a server of the native program; its address. */
export async function sternaServe(...args) {
  if (!program) skip('no native program (cargo build -p sterna-cli, or set STERNA)')
  const server = spawn(program, ['serve', ...args, '--port', '0'], { stdio: ['ignore', 'pipe', 'inherit'], env: { ...process.env, NO_COLOR: '1' } })
  servers.push(server)
  let text = ''
  for await (const piece of server.stdout) {
    text += piece
    if (text.includes('\n')) return text.trim()
  }
  throw new Error(`sterna serve ${args.join(' ')} ended`)
}
/** The tokens that the native program chooses on the CPU. */
export function nativeIds(model, prompt, n, ...args) {
  return JSON.parse(sterna('run', model, '-p', prompt, '--raw', '--temperature', '0', '--repeat-penalty', '1', '--max-tokens', String(n), '--backend', 'cpu', '--json', ...args)).ids
}
/** Makes a package of a model or an adapter, and serves it as `/NAME/`; its folder. */
export function serveAsPackage(name, model) {
  const folder = path.join(scratch, name)
  if (!existsSync(folder)) sterna('convert', model, folder, '--quiet')
  mounts[`/${name}/`] = folder
  return folder
}

const PAGE = `<!doctype html><meta charset=utf-8><title>test</title><link rel=icon href=data:,>
<script type=importmap>{"imports":{"sterna":"/pkg/index.js","doppler":"/pkg/doppler.js","0xbitnet":"/pkg/bitnet.js"}}</script>
<input type=file multiple><script type=module>
import * as api from 'sterna'
Object.assign(globalThis, api)
globalThis.tokensOf = async (model, prompt, maxTokens, options) => {
  const generation = model.generate(prompt, { maxTokens, temperature: 0, repeatPenalty: 1, logprobs: 0, ...options })
  const text = await generation.text()
  return { text, ids: generation.logprobs.map(({ id }) => id), usage: generation.usage }
}
globalThis.ready = true
</script>`
const STRICT = PAGE.replace('<title>', "<meta http-equiv=Content-Security-Policy content=\"worker-src 'self'\"><title>")
export const mounts = { '/pkg/': dist, '/': Buffer.from(PAGE), '/strict.html': Buffer.from(STRICT), ...files }
export const [site, isolated, cdn] = [await serve(mounts), await serve(mounts, { isolate: true }), await serve(mounts)]
export const browser = await openBrowser(path.join(scratch, 'profile'))

export async function open(url = site.url, before) {
  const page = await browser.newPage()
  if (before) await page.addInitScript(before)
  page.on('pageerror', error => console.log(`  page: ${error.message}`))
  page.on('console', message => { if (message.type() === 'error') console.log(`  console: ${message.text()}`) })
  await page.goto(url)
  await page.waitForFunction(() => globalThis.ready)
  return page
}
export const sentOf = name => Object.entries(site.state.sent).reduce((sum, [path, n]) => sum + (path.startsWith(name) ? n : 0), 0)

/** Leaves nothing behind for the next test. */
export async function clear() {
  for (const page of browser.pages()) await page.close().catch(() => {})
  browser.pages().length || await browser.newPage()
  site.state.reset()
  const page = await open()
  await page.evaluate(async () => { await Sterna.models.purge(); await (await navigator.storage.getDirectory()).removeEntry('mine', { recursive: true }).catch(() => {}) })
  await page.close()
}
export async function close() {
  await browser.close()
  for (const server of [site, isolated, cdn]) server.close()
  for (const server of servers) server.kill()
  rmSync(scratch, { recursive: true, force: true })
}

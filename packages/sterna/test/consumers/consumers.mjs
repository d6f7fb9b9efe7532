// The package as others use it: packed, installed into new projects, and there compiled with TypeScript, bundled
// by Vite and webpack, or copied beside a page; what comes of it computes the native program's tokens in Chromium.
//
//   node test/consumers/consumers.mjs [NAME…]      names choose consumers that contain one
//
// STERNA is the native program, as default target/debug/sterna of the repository.
import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { cpSync, existsSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import os from 'node:os'
import path from 'node:path'
import { fileURLToPath } from 'node:url'
import * as vite from 'vite'
import webpack from 'webpack'
import { executable, openBrowser, serve } from '../browser/browser.mjs'

const here = fileURLToPath(new URL('.', import.meta.url))
const root = path.join(here, '../..')
const repository = path.join(root, '../..')
const native = path.resolve(process.env.STERNA ?? path.join(repository, 'target/debug/sterna'))
const only = process.argv.slice(2)
const skip = why => { console.log(`SKIPPED: ${why}`); process.exit(0) }
if (!executable) skip('no Chromium (apt-get install chromium, or set CHROMIUM)')
if (!existsSync(path.join(root, 'dist/wasm/sterna_web_bg.wasm'))) skip('no engine in dist/wasm (scripts/build-web.sh)')
if (!existsSync(native)) skip(`no native program at ${native} (cargo build -p sterna-cli, or set STERNA)`)

const PROMPT = 'Tell me a story about a fox named Ruby.'
const N_TOKENS = 48
const HTML = script => `<!doctype html><meta charset=utf-8><title>consumer</title><link rel=icon href=data:,>\n${script}\n`

const scratch = mkdtempSync(path.join(os.tmpdir(), 'sterna-consumers-'))
const run = (command, args, cwd = scratch) => execFileSync(command, args, { cwd, encoding: 'utf8', stdio: ['ignore', 'pipe', 'inherit'] })

const model = path.join(scratch, 'tiny-tales')
run(native, ['convert', '--quiet', path.join(repository, 'crates/sterna/models/tiny-tales'), model])
const expected = JSON.parse(run(native, [
  'run', model, '-p', PROMPT, '--raw', '--temperature', '0', '--max-tokens', N_TOKENS, '--backend', 'cpu', '--json',
])).ids
const [{ filename }] = JSON.parse(run('npm', ['pack', '--json', '--pack-destination', scratch], root))
const tarball = path.join(scratch, filename)

/** A new project with the package and `files`; its folder. */
function project(name, files) {
  const folder = path.join(scratch, name)
  mkdirSync(folder)
  writeFileSync(path.join(folder, 'package.json'), JSON.stringify({ name, private: true, type: 'module' }))
  run('npm', ['install', '--offline', '--no-audit', '--no-fund', '--silent', tarball], folder)
  for (const [file, text] of Object.entries(files)) writeFileSync(path.join(folder, file), text)
  cpSync(path.join(here, 'page.js'), path.join(folder, 'page.js'))
  return folder
}

/** What makes a project, and gives the folder of its page, or the address where it is served. */
const consumers = {
  async TypeScript() {
    const compilerOptions = {
      strict: true, exactOptionalPropertyTypes: true, noUncheckedIndexedAccess: true, skipLibCheck: false, noEmit: true,
      target: 'ES2022', lib: ['ES2022', 'DOM', 'DOM.AsyncIterable'], types: [],
    }
    const folder = project('typescript', {})
    cpSync(path.join(here, 'api.ts'), path.join(folder, 'api.ts'))
    for (const [module, moduleResolution] of [['NodeNext', 'NodeNext'], ['ESNext', 'Bundler']]) {
      writeFileSync(path.join(folder, 'tsconfig.json'), JSON.stringify({ compilerOptions: { ...compilerOptions, module, moduleResolution }, files: ['api.ts'] }))
      run(process.execPath, [path.join(root, 'node_modules/typescript/bin/tsc'), '-p', folder])
    }
  },

  async Vite() {
    const folder = project('vite', { 'index.html': HTML('<script type=module src=/page.js></script>') })
    await vite.build({ root: folder, base: '/app/', logLevel: 'warn', configFile: false })
    return { folder: path.join(folder, 'dist') }
  },

  async 'Vite while developing'() {
    const folder = project('vite-dev', { 'index.html': HTML('<script type=module src=/page.js></script>') })
    const server = await vite.createServer({ root: folder, logLevel: 'warn', configFile: false, server: { host: '127.0.0.1' } })
    await server.listen()
    return { url: server.resolvedUrls.local[0], close: () => server.close() }
  },

  async webpack() {
    const folder = project('webpack', {})
    const compiler = webpack({ mode: 'production', context: folder, entry: './page.js', output: { path: path.join(folder, 'dist') }, performance: false })
    const stats = await new Promise((resolve, reject) => compiler.run((error, stats) => error ? reject(error) : resolve(stats)))
    await new Promise(done => compiler.close(done))
    assert.ok(!stats.hasErrors() && !stats.hasWarnings(), stats.toString('errors-warnings'))
    writeFileSync(path.join(folder, 'dist/index.html'), HTML('<script defer src=main.js></script>'))
    return { folder: path.join(folder, 'dist') }
  },

  async 'a page without a bundler'() {
    const folder = project('plain', { 'index.html': HTML('<script type=importmap>{"imports":{"sterna":"./sterna/index.js"}}</script>\n<script type=module src=page.js></script>') })
    cpSync(path.join(folder, 'node_modules/sterna/dist'), path.join(folder, 'sterna'), { recursive: true })
    return { folder }
  },
}

const browser = await openBrowser(path.join(scratch, 'browser'))

/** The tokens that a page computes. */
async function tokensOf(url, address) {
  const page = await browser.newPage()
  page.on('pageerror', error => console.log(`  page: ${error.message}`))
  page.on('console', message => { if (message.type() === 'error') console.log(`  console: ${message.text()}`) })
  await page.goto(url)
  await page.waitForFunction(() => globalThis.answer, null, { timeout: 30_000 })
  const tokens = await page.evaluate(([address, prompt, n]) => answer(address, prompt, n), [address, PROMPT, N_TOKENS])
  await page.close()
  return tokens
}

let failed = 0
for (const [name, make] of Object.entries(consumers)) {
  if (only.length && !only.some(part => name.includes(part))) continue
  const started = performance.now()
  try {
    const made = await make()
    // Threads are tried where a page is isolated, and what has none must do without.
    for (const isolate of made?.folder ? [false, true] : made ? [false] : []) {
      const site = await serve({ '/model/': model, ...(made.folder ? { '/app/': made.folder } : {}) }, { isolate })
      try {
        assert.deepEqual(await tokensOf(made.url ?? `${site.url}app/index.html`, `${site.url}model/`), expected)
      } finally {
        site.close()
      }
    }
    await made?.close?.()
    console.log(`ok      ${name} (${Math.round(performance.now() - started)} ms)`)
  } catch (error) {
    failed++
    console.log(`FAILED  ${name}\n${error.stdout ?? ''}${error.stack}`)
  }
}
await browser.close()
rmSync(scratch, { recursive: true, force: true })
console.log(failed ? `${failed} failed` : 'all ok')
process.exit(failed ? 1 : 0)

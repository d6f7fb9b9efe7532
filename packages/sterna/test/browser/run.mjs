// The package in real browsers: node test/browser/run.mjs [--fake] [--all] [--except NAME] [NAME…]
//
// With the engine in dist/wasm, models of ../../testdata; with --fake the engine of test/fake-engine.mjs and
// files made here, which tries the storage, the locks and the Worker. With --all more models run on the GPU, which
// fails in more ways. Names choose tests that contain one; --except leaves out those that contain its.
// The native program, for what is compared with it, is STERNA or in target.
import { existsSync } from 'node:fs'
import { parseArgs } from 'node:util'
import { executable } from './browser.mjs'

const has = file => existsSync(new URL(`../../${file}`, import.meta.url))
const { values: { fake, except }, positionals: only } = parseArgs({
  options: { fake: { type: 'boolean' }, all: { type: 'boolean' }, except: { type: 'string' } },
  allowPositionals: true,
})
const skipAll = why => { console.log(`SKIPPED: ${why}`); process.exit(0) }
if (!executable) skipAll('no Chromium (apt-get install chromium, or set CHROMIUM)')
if (!has('dist/index.js')) skipAll('no dist (npm run build)')
if (!fake && !has('dist/wasm/sterna_web_bg.wasm')) skipAll('no engine in dist/wasm (scripts/build-web.sh), and no --fake')

const { clear, close, Skipped } = await import('./stage.mjs')
const suites = ['answers', 'storage', ...(fake ? [] : ['gpu', 'models', 'peers', 'firefox'])]
let failed = 0
for (const suite of suites) {
  const { tests } = await import(`./${suite}.mjs`)
  for (const [name, test] of Object.entries(tests)) {
    if (only.length && !only.some(part => name.includes(part)) || except && name.includes(except)) continue
    const started = performance.now()
    let timer
    try {
      await Promise.race([test(), new Promise((_, reject) => { timer = setTimeout(() => reject(new Error('took longer than three minutes')), 180_000) })])
      console.log(`ok      ${name} (${Math.round(performance.now() - started)} ms)`)
    } catch (error) {
      if (error instanceof Skipped) console.log(`SKIPPED ${name}: ${error.message}`)
      else {
        failed++
        console.log(`FAILED  ${name}\n${error.stack}`)
      }
    }
    clearTimeout(timer)
    await clear()
  }
}
await close()
console.log(failed ? `${failed} failed` : 'all ok')
process.exitCode = failed ? 1 : 0

// Firefox, on the CPU: what is stored and what is said, and again without the server.
import assert from 'node:assert/strict'
import path from 'node:path'
import { firefox, openFirefox } from './bidi.mjs'
import { TALES, wideTales } from './made.mjs'
import { nativeIds, N_TOKENS, reference, scratch, serveAsPackage, site, skip } from './stage.mjs'

/** Loads a model, answers, and loads it again while its files can't be had. */
async function twice(source, prompt, n) {
  if (!firefox) skip('no Firefox (scripts/firefox.sh, or set FIREFOX)')
  const browser = await openFirefox(path.join(scratch, `firefox-${source.replace(/\W/g, '')}`))
  try {
    const page = await browser.open(site.url)
    const answer = async ({ source, prompt, n }) => {
      while (!globalThis.ready) await new Promise(next => setTimeout(next, 10))
      const started = performance.now()
      const model = await Sterna.load(source, { backend: 'cpu' })
      const { text, ids } = await tokensOf(model, prompt, n)
      await model.dispose()
      return { text, ids, backend: model.info.backend, models: await Sterna.models.list(), damaged: await Sterna.models.verify(source), ms: performance.now() - started }
    }
    const first = await page.evaluate(answer, { source, prompt, n })
    site.state.silent = name => name.startsWith(source.slice(1))
    await page.reload()
    const again = await page.evaluate(answer, { source, prompt, n })
    console.log(`  Firefox ${browser.version}: ${Math.round(first.ms)} ms, ${Math.round(again.ms)} ms from the store`)
    const [{ store, complete }] = first.models
    assert.deepEqual([store, complete, first.backend, first.damaged], ['opfs', true, 'cpu', []])
    assert.deepEqual([again.text, again.ids, again.damaged], [first.text, first.ids, []])
    return first
  } finally {
    await browser.close()
  }
}

export const tests = {
  async 'Firefox gives the native answers of a GGUF file, also offline'() {
    const [{ prompt, text }] = reference
    assert.equal((await twice('./tiny.gguf', prompt, N_TOKENS)).text, text)
  },

  async 'Firefox gives the native answers of the built-in model, also offline'() {
    const folder = serveAsPackage('tales', TALES), prompt = 'Once upon a time'
    assert.deepEqual((await twice('./tales/', prompt, 24)).ids, nativeIds(folder, prompt, 24))
  },

  async 'Firefox fetches a large file in several parts'() {
    serveAsPackage('wide', wideTales())
    await twice('./wide/', 'Once upon a time', 2)
  },
}

// Both examples with the built package and a small model that tells tales: tokens, then tokens without a network.
//   STERNA_DIST=…/packages/sterna/dist STERNA_MODEL=…/bitllama-3M-tq2_0.gguf node real.mjs
import assert from 'node:assert/strict'
import { openBrowser, origin, serve } from './browser.mjs'

const site = await serve()
site.models = [{ name: 'tiny-tales', address: '/model/tales.gguf', size: 1_123_904 }]
const browser = await openBrowser()
const page = await (await browser.newContext()).newPage()
page.setDefaultTimeout(30_000)
page.on('console', message => ['error', 'warning'].includes(message.type()) && console.log('console:', message.text()))
page.on('pageerror', error => console.log('page:', error.message))

await page.goto(`${origin(site)}/chat/`)
await page.getByRole('button', { name: 'Download and start' }).click()
await page.getByRole('button', { name: 'Once upon a time' }).click()
const tale = () => page.waitForFunction(() => document.querySelector('.assistant .note')?.textContent)
await tale()
console.log(await page.locator('.assistant').last().innerText())
console.log(await page.locator('#facts').textContent())
if (process.argv[2]) await page.screenshot({ path: `${process.argv[2]}/chat-real.png` })
await page.waitForFunction(() => navigator.serviceWorker.controller && document.querySelector('#offline').textContent)

await page.goto(`${origin(site)}/tldr/`)
await page.waitForFunction(() => navigator.serviceWorker.controller)
const sum = async () => {
  await page.getByRole('button', { name: 'Sum up this page' }).click()
  await page.waitForFunction(() => /^Sum up/.test(document.querySelector('sterna-tldr').shadowRoot.querySelector('button').textContent))
  const text = await page.locator('sterna-tldr [part=panel]').innerText()
  assert.match(text, /key sentences/)
  return text
}
console.log(await sum())
if (process.argv[2]) await page.screenshot({ path: `${process.argv[2]}/tldr-real.png` })

await site.close()
await page.reload()
await sum()
await page.goto(`${origin(site)}/chat/`)
await page.waitForFunction(() => document.querySelector('#model-name').textContent === 'tiny-tales')
await page.getByRole('button', { name: 'The little bird wanted to see the sea.' }).click()
await tale()
assert.match(await page.locator('.assistant .note').textContent(), /tokens/)
console.log('ok')
await browser.close()

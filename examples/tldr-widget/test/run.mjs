// Drives the widget's demo page in headless Chromium with a fake package.
//   node run.mjs [FOLDER FOR SCREENSHOTS]     from packages/sterna, whose node_modules it takes
import assert from 'node:assert/strict'
import { axe, openBrowser, origin, serve } from '../../web-chat/test/browser.mjs'

const shots = process.argv[2]
const site = await serve()
const browser = await openBrowser()
const failures = []
async function open({ scheme = 'light', width = 1280, height = 800, model } = {}) {
  site.models = [{ name: 'tiny-tales', address: '/model/tales.gguf', size: 1_123_904 }]
  const context = await browser.newContext({ colorScheme: scheme, viewport: { width, height } })
  const page = await context.newPage()
  page.setDefaultTimeout(10_000)
  page.on('console', message => message.type() === 'error' && !/ERR_FAILED|ERR_CONNECTION/.test(message.text()) && failures.push(message.text()))
  page.on('pageerror', error => failures.push(String(error.stack)))
  await page.goto(`${origin(site)}/tldr/`)
  if (model) await page.evaluate(model => document.querySelector('sterna-tldr').setAttribute('model', model), model)
  await page.evaluate(() => { globalThis.fakeAnswer = 'Arctic terns travel farther than any other animal, in a long curve that follows the winds. Loggers of a gram showed their way of seventy thousand kilometres a year. Warmer seas leave less food for their young.' })
  return page
}
async function look(page, name) {
  if (shots) await page.screenshot({ path: `${shots}/tldr-${name}.png` })
  assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), `${name} is too wide`)
  for (const { id, nodes } of await axe(page)) failures.push(`axe, ${name}: ${id} ${nodes.map(({ target }) => target).join(' | ')}`)
}
const summary = page => page.locator('sterna-tldr [part=summary]')
const ready = page => page.getByRole('button', { name: /^Sum up/ }).waitFor()

for (const scheme of ['light', 'dark']) for (const [size, width, height] of [['desktop', 1280, 800], ['phone', 375, 740]]) {
  const page = await open({ scheme, width, height, model: 'example/big' })
  await look(page, `1-idle-${size}-${scheme}`)
  await page.getByRole('button', { name: 'Sum up this page' }).click()
  await page.getByRole('button', { name: 'Not now' }).waitFor()
  assert.match(await page.locator('sterna-tldr [part=status]').textContent(), /612 MB/)
  await look(page, `2-ask-${size}-${scheme}`)
  await page.evaluate(() => { globalThis.fakeRate = 3e7 })
  await page.getByRole('button', { name: 'Download' }).click()
  await page.waitForFunction(() => document.querySelector('sterna-tldr').shadowRoot.querySelector('progress').value > 0.3)
  await look(page, `3-download-${size}-${scheme}`)
  await page.getByText('less food for their young').waitFor()
  await ready(page)
  assert.match(await page.evaluate(() => globalThis.fakeAsked), /in English[^]*The longest way[^]*decided on another/)
  assert.doesNotMatch(await page.evaluate(() => globalThis.fakeAsked), /Two lines/)
  await look(page, `4-summary-${size}-${scheme}`)
  await page.context().close()
}

// A selection, a stop, another language; a model that can't sum up, without a network.
{
  const page = await open({ model: 'example/big' })
  await page.evaluate(() => { globalThis.fakeRate = 1e9; document.querySelector('sterna-tldr').lang = 'de'; getSelection().selectAllChildren(document.querySelectorAll('article p')[2]) })
  await page.getByRole('button', { name: 'Sum up the selection' }).click()
  await page.getByRole('button', { name: 'Download' }).click()
  await page.getByText('less food for their young').waitFor()
  await ready(page)
  const asked = await page.evaluate(() => globalThis.fakeAsked)
  assert.match(asked, /in German/)
  assert.match(asked, /a ruler on a map/)
  assert.doesNotMatch(asked, /straight line/)
  await page.evaluate(() => { globalThis.fakePace = 100 })
  await page.getByRole('button', { name: 'Sum up' }).click()
  await page.getByText('Writing').waitFor()
  await page.keyboard.press('Escape')
  await page.getByText('Stopped.').waitFor()
  await page.context().close()
}
{
  const page = await open()
  await page.evaluate(() => navigator.serviceWorker.ready)
  await page.waitForFunction(() => navigator.serviceWorker.controller)
  await page.getByRole('button', { name: 'Sum up this page' }).click()
  await page.getByText('flew to the sea').waitFor()
  await ready(page)
  assert.equal(await page.locator('sterna-tldr li').count(), 3)
  await look(page, '5-tale')
  await site.close()
  await page.reload()
  await page.getByRole('button', { name: 'Sum up this page' }).click()
  await page.getByText('flew to the sea').waitFor()
  await page.context().close()
}
await browser.close()
if (failures.length) console.error(failures.join('\n'))
console.log(failures.length ? `${failures.length} failures` : 'ok')
process.exitCode = failures.length ? 1 : 0

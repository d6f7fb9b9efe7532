// Drives the chat in headless Chromium with a fake package: behaviour, accessibility, width of a phone, offline.
//   node run.mjs [FOLDER FOR SCREENSHOTS]     from packages/sterna, whose node_modules it takes
import assert from 'node:assert/strict'
import { mkdir } from 'node:fs/promises'
import { openBrowser, origin, serve, axe } from './browser.mjs'

const shots = process.argv[2]
if (shots) await mkdir(shots, { recursive: true })
const site = await serve()
const browser = await openBrowser()
const failures = []
/** A page of a profile of its own. */
async function open({ scheme = 'light', width = 1280, height = 800, path = '', models = true } = {}) {
  site.models = models ? [{ name: 'tiny-tales', address: '/model/tales.gguf', size: 1_123_904 }] : undefined
  const context = await browser.newContext({ colorScheme: scheme, viewport: { width, height }, permissions: ['clipboard-read', 'clipboard-write'] })
  const page = await context.newPage()
  page.setDefaultTimeout(10_000)
  page.on('console', message => message.type() === 'error' && !/40[14]|429|ERR_FAILED|ERR_CONNECTION/.test(message.text()) && failures.push(message.text()))
  page.on('pageerror', error => failures.push(String(error.stack)))
  await page.goto(`${origin(site)}/chat/${path}`)
  return page
}
async function look(page, name) {
  if (shots) await page.screenshot({ path: `${shots}/chat-${name}.png` })
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth)
  assert.ok(wide <= 0, `${name}: ${wide} pixels too wide`)
  for (const { id, nodes } of await axe(page)) failures.push(`axe, ${name}: ${id} ${nodes.map(node => `${node.target} ${node.any[0]?.message ?? ''}`).join(' | ')}`)
}
const answered = page => page.waitForFunction(() => document.querySelector('.note')?.textContent && document.querySelector('#send')?.ariaLabel === 'Send')
async function begin(page) {
  await page.getByRole('button', { name: 'Download and start' }).click()
  await page.getByRole('heading', { name: /Begin a text|Ask something/ }).waitFor()
}

// Conversations, stop, again, edit, rename, delete; kept over a reload.
{
  const page = await open()
  await begin(page)
  assert.match(await page.locator('#backend').textContent(), /CPU/)
  assert.match(await page.locator('#facts').textContent(), /no_adapter/)
  await page.getByLabel('Message').fill('Once upon a time')
  await page.evaluate(() => { globalThis.fakePace = 60 })
  await page.keyboard.press('Enter')
  await page.waitForFunction(() => document.querySelector('.assistant .body')?.textContent.length > 20)
  await page.keyboard.press('Escape')
  await answered(page)
  assert.match(await page.locator('.note').textContent(), /stopped/)
  await page.evaluate(() => { globalThis.fakePace = 1 })
  await page.getByRole('button', { name: 'Answer again' }).last().click()
  await page.locator('#messages').getByText('flew to the sea').waitFor()
  await answered(page)
  assert.equal(await page.locator('#messages > li').count(), 2)
  assert.match(await page.locator('#live').textContent(), /^Answer: .*flew to the sea/s)
  await page.getByRole('button', { name: 'Edit' }).click()
  await page.getByLabel('Edit the message').fill('One day')
  await page.getByRole('button', { name: 'Ask this' }).click()
  await answered(page)
  assert.equal(await page.evaluate(() => globalThis.fakeAsked), 'One day')
  await page.getByLabel('Message').fill('fail')
  await page.keyboard.press('Enter')
  await page.getByText('The GPU was lost. (device_lost)').waitFor()
  await page.getByLabel('Message').fill('and go on')
  await page.keyboard.press('Enter')
  await page.locator('.user').getByText('and go on').waitFor()
  assert.equal(await page.evaluate(() => globalThis.fakeAsked), 'fail\n\nand go on', 'two questions in a row become one')
  await page.getByRole('button', { name: /^Rename/ }).click()
  await page.getByLabel('Name of the conversation').fill('A tale')
  await page.keyboard.press('Enter')
  await page.getByRole('button', { name: 'A tale', exact: true }).waitFor()
  await page.waitForFunction(() => navigator.serviceWorker.controller && document.querySelector('#offline').textContent)

  // Without a network: the page, the model that is stored, the conversations.
  await site.close()
  await page.reload()
  await page.getByRole('button', { name: 'A tale', exact: true }).click()
  await page.locator('#messages').getByText('One day').first().waitFor()
  await page.waitForFunction(() => document.querySelector('#model-name').textContent === 'tiny-tales')
  assert.equal(await page.evaluate(() => crossOriginIsolated), true, 'isolated by the service worker')
  await page.getByRole('button', { name: 'Delete A tale' }).click()
  await page.getByRole('button', { name: 'Delete', exact: true }).click()
  await page.getByText('Conversations stay in this browser.').waitFor()
  await page.getByRole('button', { name: /Theme/ }).click()
  await page.getByRole('button', { name: 'Theme: Light' }).click()
  assert.equal(await page.evaluate(() => getComputedStyle(document.documentElement).colorScheme), 'dark')
  await page.context().close()
  await site.open()
}

// What goes wrong, a file, no model of the server's own.
{
  const page = await open({ models: false })
  await page.getByRole('button', { name: 'Choose a model', exact: true }).last().click()
  await page.getByLabel(/Address of a package/).fill('https://example.com/missing/')
  await page.keyboard.press('Enter')
  await page.getByText('HTTP 404 (not_found)').waitFor()
  await look(page, 'failed')
  await page.getByRole('button', { name: 'Other models' }).click()
  await page.getByLabel(/Address of a package/).fill('example/huge')
  await page.keyboard.press('Enter')
  await page.getByText(/A tab can't have the 9.4 GB/).waitFor()
  assert.ok(await page.locator('#job').getByRole('button', { name: 'Download and start' }).isDisabled())
  await look(page, 'refused')
  await page.getByRole('button', { name: 'Other models' }).click()
  await page.getByLabel(/Choose a .gguf file/).setInputFiles({ name: 'mine.gguf', mimeType: '', buffer: Buffer.from('GGUF') })
  await page.getByRole('button', { name: 'Start', exact: true }).click()
  await page.waitForFunction(() => document.querySelector('#model-name').textContent === 'mine')
  const drop = await page.evaluateHandle(() => { const data = new DataTransfer(); data.items.add(new File(['GGUF'], 'dropped.gguf')); return data })
  await page.dispatchEvent('body', 'drop', { dataTransfer: drop })
  await page.getByRole('heading', { name: 'dropped' }).waitFor()
  await page.context().close()
}

// A model that the server of the page answers for, by its API: asked, stopped, asked again, kept over a reload.
{
  site.answers = { 'tiny:red': 'The server says that foxes are red.', other: 'No.' }
  const page = await open({ models: false })
  await page.getByText('tiny:red answers on the server of this page').waitFor()
  await look(page, 'server-ready')
  assert.match(await page.locator('#backend').textContent(), /Server/)
  assert.match(await page.locator('#facts').textContent(), /the server of this page.*4,?096 tokens/s)
  await page.getByLabel('Message').fill('Which colour?')
  await page.keyboard.press('Enter')
  await answered(page)
  await page.locator('#messages').getByText('foxes are red.').waitFor()
  assert.match(await page.locator('.note').textContent(), /^7 tokens/)
  site.pace = 100
  await page.getByLabel('Message').fill('And cubs?')
  await page.keyboard.press('Enter')
  await page.waitForFunction(() => document.querySelectorAll('.assistant .body')[1]?.textContent.length > 6)
  await page.keyboard.press('Escape')
  await page.waitForFunction(() => /stopped/.test(document.querySelectorAll('.note')[1]?.textContent ?? ''))
  site.pace = 2
  await page.getByRole('button', { name: 'Answer again' }).last().click()
  await page.waitForFunction(() => /^7 tokens/.test(document.querySelectorAll('.note')[1]?.textContent ?? ''))
  const { model, messages, stream } = site.asked.at(-1)
  assert.deepEqual({ model, stream, roles: messages.map(({ role }) => role) }, { model: 'tiny:red', stream: true, roles: ['user', 'assistant', 'user'] })
  await page.reload()
  await page.waitForFunction(() => document.querySelector('#model-name').textContent === 'tiny:red')
  await page.locator('#model').click()
  await page.getByText('Answered by this server').waitFor()
  await look(page, 'server-picker')
  await page.getByRole('button', { name: 'Ask other' }).click()
  await page.waitForFunction(() => document.querySelector('#model-name').textContent === 'other')
  await page.context().close()
  site.answers = undefined
}

// A server that asks for a key: none, a wrong one, the right one; one that has spent its requests; one that is no more.
{
  site.answers = { tiny: 'The server says that foxes are red.' }
  site.key = 'sk-right'
  const page = await open()
  await page.getByRole('heading', { name: 'This server asks for a key' }).waitFor()
  await page.getByRole('button', { name: 'Download and start' }).waitFor()
  await look(page, 'key-asked')
  const enter = async key => {
    await page.getByLabel('Key of this server').fill(key)
    await page.getByRole('button', { name: 'Use the key' }).click()
  }
  await enter('a wrong key')
  await page.getByText('A key has letters, digits and signs, and no spaces.').waitFor()
  await enter('sk-wrong')
  await page.getByText('The server doesn’t take this key.').waitFor()
  await look(page, 'key-wrong')
  await enter('sk-right')
  await page.getByText('tiny answers on the server of this page').waitFor()
  assert.deepEqual(await page.evaluate(() => [sessionStorage.getItem('sterna-chat.key'), localStorage.getItem('sterna-chat.key')]), ['sk-right', null])
  site.busy = 12
  await page.getByLabel('Message').fill('Which colour?')
  await page.keyboard.press('Enter')
  await page.getByText('The server says: the key has spent its requests of this minute. It takes requests again in 12 seconds.').waitFor()
  await look(page, 'key-spent')
  site.busy = undefined
  await page.getByRole('button', { name: 'Try again' }).click()
  await page.locator('#messages').getByText('foxes are red.').waitFor()
  // Another key while a conversation is open.
  site.key = 'sk-other'
  await page.getByLabel('Message').fill('And cubs?')
  await page.keyboard.press('Enter')
  await page.locator('.failed').getByText('The server doesn’t take this key.').waitFor()
  await page.getByLabel(/Remember it/).check()
  await enter('sk-other')
  await page.waitForFunction(() => document.querySelectorAll('.note')[1]?.textContent)
  assert.deepEqual(await page.evaluate(() => [sessionStorage.getItem('sterna-chat.key'), localStorage.getItem('sterna-chat.key')]), [null, 'sk-other'])
  // Another tab has it, until it is forgotten.
  const tab = await page.context().newPage()
  await tab.goto(page.url())
  await tab.waitForFunction(() => document.querySelector('#model-name').textContent === 'tiny')
  await tab.locator('#backend').click()
  await tab.getByRole('button', { name: 'Forget the key' }).click()
  await tab.getByRole('heading', { name: 'This server asks for a key' }).waitFor()
  await tab.locator('#model').click()
  await tab.locator('#picker').getByLabel('Key of this server').waitFor()
  await page.context().close()
  site.answers = site.key = undefined
}

// Thoughts are folded; a reload amid an answer keeps what there is, and the conversation goes on. No engine in the tab.
for (const scheme of ['light', 'dark']) {
  site.hasPackage = false
  site.answers = { tiny: { thought: 'Foxes have fur.\nFur has colours.', text: 'The server says that foxes are red, mostly.' } }
  const page = await open({ scheme, models: false, width: scheme === 'dark' ? 375 : 1280 })
  await page.getByText('tiny answers on the server of this page').waitFor()
  await page.getByLabel('Message').fill('Which colour?')
  site.pace = 150
  await page.keyboard.press('Enter')
  const thought = page.locator('.thought').first()
  await thought.getByText('Reasoning').waitFor()
  assert.equal(await thought.evaluate(box => box.open), false)
  await page.waitForFunction(() => document.querySelector('.assistant .body')?.textContent.includes('says'))
  await page.reload()
  await page.waitForFunction(() => document.querySelector('.note')?.textContent === 'interrupted')
  await page.waitForFunction(() => document.querySelector('#model-name').textContent === 'tiny')
  assert.match(await page.locator('.assistant .body').textContent(), /^The/)
  site.pace = 2
  await page.getByRole('button', { name: 'Answer again' }).click()
  await page.locator('#messages').getByText('foxes are red, mostly.').waitFor()
  await answered(page)
  await thought.getByText('Reasoning').click()
  await thought.getByText('Fur has colours.').waitFor()
  await look(page, `thought-${scheme}`)
  await page.getByLabel('Message').fill('And cubs?')
  await page.keyboard.press('Enter')
  await page.waitForFunction(() => document.querySelectorAll('.note').length === 2)
  assert.deepEqual(site.asked.at(-1).messages, [
    { role: 'user', content: 'Which colour?' }, { role: 'assistant', content: 'The server says that foxes are red, mostly.' }, { role: 'user', content: 'And cubs?' }])
  await page.locator('#model').click()
  await page.getByText('models run on the server only').waitFor()
  assert.equal(await page.getByText('From the web').isVisible(), false)
  await look(page, `server-only-${scheme}`)
  await page.context().close()
  site.answers = undefined
  site.hasPackage = true
}
{
  site.hasPackage = false
  const page = await open({ models: false })
  await page.getByText('It offers none to this page').waitFor()
  await look(page, 'nothing')
  await page.context().close()
  site.hasPackage = true
}

// Every view, in both themes and widths.
for (const scheme of ['light', 'dark']) for (const [size, width, height] of [['desktop', 1280, 800], ['phone', 375, 740]]) {
  const at = `${size}-${scheme}`
  const page = await open({ scheme, width, height })
  await page.getByRole('button', { name: 'Download and start' }).waitFor()
  await look(page, `1-welcome-${at}`)
  await page.getByRole('button', { name: 'Other models' }).click()
  await page.getByText('From the web').waitFor()
  await look(page, `2-picker-${at}`)
  await page.getByLabel(/Address of a package/).fill('example/bitnet-2b')
  await page.getByRole('button', { name: 'Look' }).click()
  await page.getByText('600 MB').or(page.getByText('612 MB')).first().waitFor()
  await look(page, `3-plan-${at}`)
  await page.locator('#job').getByRole('button', { name: 'Download and start' }).click()
  await page.waitForFunction(() => document.querySelector('#job progress')?.value > 0.3)
  await page.getByRole('button', { name: 'Pause' }).press('Enter')
  await page.getByRole('button', { name: 'Resume' }).waitFor()
  assert.equal(await page.evaluate(() => document.activeElement?.textContent), 'Resume', 'focus follows the button')
  await look(page, `4-paused-${at}`)
  await page.evaluate(() => { globalThis.fakeRate = 1e8 })
  await page.getByRole('button', { name: 'Resume' }).click()
  await page.getByRole('heading', { name: 'Ask something' }).waitFor()
  await look(page, `5-ready-${at}`)
  await page.getByLabel('Message').fill('Explain why the sky is blue, in three sentences.')
  await page.keyboard.press('Enter')
  await page.waitForFunction(() => document.querySelectorAll('.body p').length > 1)
  await look(page, `6-answering-${at}`)
  await answered(page)
  await page.locator('#log').evaluate(log => { log.scrollTop = 0 })
  await page.waitForTimeout(100)
  await look(page, `7-answer-${at}`)
  assert.equal(await page.evaluate(() => globalThis.hacked), undefined)
  assert.equal(await page.locator('.assistant img').count(), 0)
  await page.getByRole('button', { name: 'Edit' }).first().click()
  await look(page, `8-edit-${at}`)
  await page.getByRole('button', { name: 'Cancel' }).click()
  await page.locator('#backend').click()
  await look(page, `9-facts-${at}`)
  await page.keyboard.press('Escape')
  if (size === 'phone') {
    await page.getByRole('button', { name: 'Conversations' }).click()
    await page.waitForTimeout(300)
    await look(page, `10-list-${at}`)
  }
  await page.context().close()
}

await browser.close()
await site.close()
if (failures.length) console.error(failures.join('\n'))
console.log(failures.length ? `${failures.length} failures` : 'ok')
process.exitCode = failures.length ? 1 : 0

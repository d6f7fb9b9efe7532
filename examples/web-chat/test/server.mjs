// The chat against a server as it is run: `sterna serve` with the built-in model, whose root leads to the page.
//   STERNA=…/target/debug/sterna node server.mjs [FOLDER FOR SCREENSHOTS]     from packages/sterna
import assert from 'node:assert/strict'
import { execFileSync, spawn } from 'node:child_process'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { axe, openBrowser } from './browser.mjs'

const { STERNA: sterna } = process.env
if (!sterna) {
  console.log('skipped: STERNA names no program')
  process.exit()
}
const home = mkdtempSync(join(tmpdir(), 'sterna-chat-'))
const newKey = name => execFileSync(sterna, ['serve', '--new-api-key', name], { encoding: 'utf8', stdio: ['ignore', 'pipe', 'ignore'] }).trim().split('\n')
const [key, line] = newKey('ann')
// Two requests a minute.
const [spent, spentLine] = newKey('bob')
writeFileSync(join(home, 'keys'), `${line}\n${spentLine} rpm=2\n`)
// Tales as long as the context, so that they can be stopped.
const server = spawn(sterna, ['serve', 'builtin', '--no-files', '--port', '0', '--api-keys', join(home, 'keys'), '--ctx', '4096'], { stdio: ['ignore', 'pipe', 'ignore'], env: { ...process.env, STERNA_HOME: home } })
const [address] = await new Promise((resolve, reject) => {
  createInterface(server.stdout).once('line', line => resolve([line]))
  server.once('exit', code => reject(new Error(`the server ended with ${code}`)))
})
const browser = await openBrowser()
try {
  const page = await (await browser.newContext({ viewport: { width: 1280, height: 800 } })).newPage()
  page.setDefaultTimeout(60_000)
  const failures = []
  page.on('pageerror', error => failures.push(String(error.stack)))
  const look = async name => {
    if (process.argv[2]) await page.screenshot({ path: `${process.argv[2]}/served-${name}.png` })
    for (const { id } of await axe(page)) failures.push(`axe, ${name}: ${id}`)
  }
  await page.goto(address)
  assert.equal(new URL(page.url()).pathname, '/chat/')
  const enter = async text => {
    await page.getByLabel('Key of this server').first().fill(text)
    await page.getByRole('button', { name: 'Use the key' }).first().click()
  }
  await enter('sk-nobody-has-this-key')
  await page.getByText('The server doesn’t take this key.').waitFor()
  await look('wrong')
  await enter(key)
  await page.getByText('builtin answers on the server of this page').waitFor()
  await look('ready')

  const notes = n => page.waitForFunction(n => document.querySelectorAll('.note').length === n && document.querySelector('#send')?.ariaLabel === 'Send', n)
  const send = async text => {
    await page.getByLabel('Message').fill(text)
    await page.keyboard.press('Enter')
  }
  await send('Tell me a story about a fox named Ruby.')
  await notes(1)
  const tale = await page.locator('.assistant .body').textContent()
  assert.match(tale, /Ruby/)
  assert.match(await page.locator('.note').textContent(), /^\d+ tokens · /)
  await look('answered')

  // Again, and gone on with after a reload: the server is sent all of it.
  await page.getByRole('button', { name: 'Answer again' }).click()
  await notes(1)
  const again = await page.locator('.assistant .body').textContent()
  await page.reload()
  await notes(1)
  assert.equal(await page.locator('.assistant .body').textContent(), again)
  await page.waitForFunction(() => document.querySelector('#model-name').textContent === 'builtin')
  await send('And then?')
  await notes(2)

  // Stopped: whoever goes away frees the place.
  let held
  await page.route('**/v1/chat/completions', async route => {
    // An answer that the test can stop, however fast the server is.
    held = new Promise(resolve => page.once('requestfailed', resolve))
    await new Promise(resolve => setTimeout(resolve, 300))
    await route.continue().catch(() => {})
  })
  await send('Once more')
  await page.getByRole('button', { name: 'Stop' }).click()
  await held
  await page.locator('.failed').getByText('Stopped.').waitFor()
  await page.unroute('**/v1/chat/completions')

  // A key that has spent what it may use.
  await page.locator('#backend').click()
  await page.getByRole('button', { name: 'Forget the key' }).click()
  await page.getByRole('button', { name: 'New chat' }).click()
  await enter(spent)
  await page.getByText('builtin answers on the server of this page').waitFor()
  for (const n of [1, 2]) {
    await send(`A tale, number ${n}`)
    await notes(n)
  }
  await send('A third tale')
  await page.getByText(/It takes requests again in \d+ seconds?\./).waitFor()
  await look('spent')
  const metrics = await (await fetch(`${address}metrics`, { headers: { Authorization: `Bearer ${key}` } })).text()
  assert.match(metrics, /sterna_limited_requests_total\{key="bob",limit="requests"\} 1\b/)
  assert.deepEqual(failures, [])
  console.log('ok')
} finally {
  await browser.close()
  server.kill()
  rmSync(home, { recursive: true, force: true })
}

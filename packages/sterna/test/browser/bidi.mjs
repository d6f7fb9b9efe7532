// Stock Firefox, driven by WebDriver BiDi: https://w3c.github.io/webdriver-bidi/
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { existsSync, mkdirSync } from 'node:fs'
import WebSocket from 'ws'

export const firefox = process.env.FIREFOX ?? ['/usr/bin/firefox-esr', '/usr/bin/firefox'].find(existsSync)

/** A browser that keeps its storage in `folder`. */
export async function openFirefox(folder) {
  mkdirSync(folder, { recursive: true })
  const child = spawn(firefox, ['--headless', '--no-remote', '--profile', folder, '--remote-debugging-port', '0'], { stdio: ['ignore', 'ignore', 'pipe'] })
  const exited = once(child, 'exit')
  const address = await new Promise((resolve, reject) => {
    let said = ''
    child.stderr.on('data', data => {
      said += data
      const found = /WebDriver BiDi listening on (ws:\S+)/.exec(said)
      if (found) resolve(found[1])
    })
    exited.then(() => reject(new Error(`Firefox ended: ${said}`)), reject)
  })
  const socket = new WebSocket(`${address}/session`, { perMessageDeflate: false })
  await once(socket, 'open')
  const calls = new Map()
  socket.on('message', data => {
    const { id, type, result, error, message } = JSON.parse(data)
    const call = calls.get(id)
    calls.delete(id)
    if (type === 'error') call?.reject(new Error(`${error}: ${message}`))
    else call?.resolve(result)
  })
  let last = 0
  const call = (method, params = {}) => new Promise((resolve, reject) => {
    calls.set(++last, { resolve, reject })
    socket.send(JSON.stringify({ id: last, method, params }))
  })
  const { capabilities } = await call('session.new', { capabilities: {} })
  return {
    version: capabilities.browserVersion,
    /** A tab with a page of the tests. */
    async open(url) {
      const { context } = await call('browsingContext.create', { type: 'tab' })
      await call('browsingContext.navigate', { context, url, wait: 'complete' })
      const page = {
        /** What `use(argument)` gives in the page; both are JSON. */
        async evaluate(use, argument) {
          const functionDeclaration = `async text => JSON.stringify(await (${use})(JSON.parse(text))) ?? 'null'`
          const answer = await call('script.callFunction', {
            functionDeclaration, arguments: [{ type: 'string', value: JSON.stringify(argument ?? null) }], awaitPromise: true, target: { context },
          })
          if (answer.type === 'exception') throw new Error(`Firefox: ${answer.exceptionDetails.text}`)
          return JSON.parse(answer.result.value)
        },
        reload: () => call('browsingContext.reload', { context, wait: 'complete' }),
        close: () => call('browsingContext.close', { context }),
      }
      return page
    },
    async close() {
      call('browser.close').catch(() => {})
      await Promise.race([exited, new Promise(resolve => setTimeout(resolve, 10_000))])
      child.kill()
      socket.terminate()
    },
  }
}

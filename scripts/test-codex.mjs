// Codex against a server whose model is forced: first to call a command, then to say what is expected.
//   node test-codex.mjs URL CODEX
// A proxy stands between them. It writes down what Codex sends, and adds to it what the answer has to match: the name
// of a tool and its only arguments, then the only text. What is forced, streamed and read is the server's own.
import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { createServer } from 'node:http'
import { homedir, tmpdir } from 'node:os'
import { join } from 'node:path'

const [url, codex] = process.argv.slice(2)
// Codex doesn't put its helpers below the folder for temporary files.
const scratch = mkdtempSync(join(homedir(), '.sterna-codex-'))
const work = mkdtempSync(join(tmpdir(), 'sterna-codex-'))
const command = 'echo the fox was here > note.txt'
const said = 'The fox left a note.'
const asked = []

/** What is added to a request of Codex. */
function forced(request) {
  if (request.input?.some(({ type }) => type === 'function_call_output')) {
    return { ...request, tool_choice: 'none', text: { format: { type: 'json_schema', name: 'said', schema: { enum: [said] } } } }
  }
  const tools = request.tools.map(tool => {
    if (tool.name !== 'exec_command') return tool
    return { ...tool, parameters: { type: 'object', properties: { cmd: { enum: [command] } }, required: ['cmd'], additionalProperties: false } }
  })
  return { ...request, tools, tool_choice: { type: 'function', name: 'exec_command' } }
}

const proxy = createServer(async (request, response) => {
  let text = ''
  for await (const piece of request) text += piece
  const isAnswer = request.method === 'POST' && request.url.endsWith('/responses')
  const body = isAnswer ? JSON.parse(text) : undefined
  if (isAnswer) asked.push(body)
  const init = { method: request.method, headers: { 'Content-Type': 'application/json' } }
  if (text) init.body = isAnswer ? JSON.stringify(forced(body)) : text
  try {
    const answer = await fetch(new URL(request.url.replace(/^\/v1/, url), url), init)
    response.writeHead(answer.status, { 'Content-Type': answer.headers.get('content-type') ?? '' })
    for await (const piece of answer.body) response.write(piece)
  } catch (error) {
    console.error(error)
  }
  response.end()
})
await new Promise(resolve => proxy.listen(0, '127.0.0.1', resolve))

try {
  writeFileSync(join(scratch, 'config.toml'), `
model = "builtin"
model_provider = "sterna"
[model_providers.sterna]
name = "Sterna"
base_url = "http://127.0.0.1:${proxy.address().port}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
stream_idle_timeout_ms = 600000
`)
  const last = join(scratch, 'last.txt')
  const args = ['exec', '--skip-git-repo-check', '-s', 'danger-full-access', '-o', last, '-C', work, 'Leave a note.']
  const child = spawn(codex, args, { stdio: ['ignore', 'inherit', 'inherit'], env: { ...process.env, CODEX_HOME: scratch } })
  const code = await new Promise((resolve, reject) => child.once('exit', resolve).once('error', reject))
  if (process.env.SHOW) writeFileSync(process.env.SHOW, JSON.stringify(asked, null, 1))
  assert.equal(code, 0)
  const [first, second] = asked
  // Tools of kinds that the server doesn't know are skipped, not refused.
  console.log(`tools: ${first.tools.map(({ type, name }) => name ?? type).join(', ')}`)
  assert.ok(first.tools.some(({ type }) => type !== 'function'), 'a tool of another kind is sent')
  const call = second.input.find(({ type }) => type === 'function_call')
  assert.deepEqual([call.name, JSON.parse(call.arguments)], ['exec_command', { cmd: command }])
  assert.equal(second.input.find(({ type }) => type === 'function_call_output').call_id, call.call_id)
  assert.equal(readFileSync(join(work, 'note.txt'), 'utf8').trim(), 'the fox was here')
  assert.equal(JSON.parse(readFileSync(last, 'utf8')), said)

  // What it asks beside that: its list of models, and a probe of nothing.
  const models = await (await fetch(`${url}/models`)).json()
  assert.deepEqual(models.models.map(({ slug }) => slug), models.data.map(({ id }) => id))
  const probe = await fetch(`${url}/responses`, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ model: 'builtin', input: [], max_output_tokens: 1, store: false }) })
  assert.equal(probe.status, 200)
  console.log('codex: ok')
} finally {
  proxy.closeAllConnections()
  proxy.close()
  rmSync(scratch, { recursive: true, force: true })
  rmSync(work, { recursive: true, force: true })
}

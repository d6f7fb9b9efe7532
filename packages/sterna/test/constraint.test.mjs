// The module for schemas, if scripts/build-web.sh has made it.
import assert from 'node:assert/strict'
import { existsSync, readFileSync } from 'node:fs'
import { test } from 'node:test'

const dist = new URL('../dist/wasm-constraint/', import.meta.url)
const missing = !existsSync(new URL('sterna_constraint_web.js', dist)) && 'no dist/wasm-constraint (scripts/build-web.sh)'

test('what is allowed comes from WebAssembly', { skip: missing }, async () => {
  const { default: init, Vocabulary } = await import(new URL('sterna_constraint_web.js', dist))
  const module = new WebAssembly.Module(readFileSync(new URL('sterna_constraint_web_bg.wasm', dist)))
  // What nothing but C would call isn't there.
  assert.ok(!WebAssembly.Module.exports(module).some(({ name }) => name.startsWith('llg_')))
  await init({ module_or_path: module })
  const bytes = Uint8Array.from({ length: 256 }, (_, i) => i)
  const vocabulary = new Vocabulary(bytes, Uint32Array.from(bytes, byte => byte + 1))
  /** The letters that may come, and whether the output may end. */
  const next = constraint => {
    const words = constraint.allowed()
    const letters = [...bytes].filter(byte => words[byte >> 5] >>> (byte & 31) & 1)
    return [String.fromCharCode(...letters), words.at(-1) === 1]
  }
  const say = (constraint, text) => { for (const byte of new TextEncoder().encode(text)) constraint.accept(byte) }

  const regex = vocabulary.constraint('regex', 'ab?')
  assert.deepEqual(next(regex), ['a', false])
  say(regex, 'a')
  assert.deepEqual(next(regex), ['b', true])
  assert.throws(() => regex.accept(0), { code: 'invalid_request' })
  const schema = vocabulary.constraint('schema', '{"type":"object","properties":{"ok":{"type":"boolean"}},"required":["ok"],"additionalProperties":false}')
  say(schema, '{"ok": ')
  assert.match(next(schema)[0], /^[ \n]*ft$/)
  say(schema, 'true}')
  assert.deepEqual(next(schema), ['', true])
  assert.deepEqual(next(vocabulary.constraint('grammar', 'start: "x" | "y"')), ['xy', false])
  for (const [kind, text] of [['schema', '{'], ['schema', '[]'], ['regex', '('], ['grammar', ''], ['xml', '']])
    assert.throws(() => vocabulary.constraint(kind, text), { code: 'invalid_request' })
})

test('deep schemas are refused, and the next is not', { skip: missing }, async () => {
  const { Vocabulary } = await import(new URL('sterna_constraint_web.js', dist))
  const vocabulary = new Vocabulary(Uint8Array.of(49), Uint32Array.of(1))
  const chain = n => JSON.stringify({ $ref: '#/$defs/a0', $defs: Object.fromEntries(Array.from({ length: n + 1 }, (_, i) => [`a${i}`, i < n ? { $ref: `#/$defs/a${i + 1}` } : { const: 1 }])) })
  for (const n of [100, 10_000, 200]) {
    const make = () => vocabulary.constraint('schema', chain(n)).free()
    if (n < 1000) make()
    else assert.throws(make, { code: 'invalid_request', message: /at most 800 schemas inside one another/ })
  }
})

// without-exports.mjs MODULE PREFIX: takes the exports whose names begin with PREFIX out of a WebAssembly module, so
// that wasm-opt drops what only they use. llguidance exports its interface for C (`llg_…`) from whatever links it.
import { readFileSync, writeFileSync } from 'node:fs'

const [path, prefix] = process.argv.slice(2)
const bytes = readFileSync(path)

/** The LEB128 number at `at`, and where it ends. */
function number(at) {
  for (let value = 0, shift = 0; ; shift += 7) {
    const byte = bytes[at++]
    value += (byte & 127) * 2 ** shift
    if (byte < 128) return [value, at]
  }
}
function leb(value) {
  const rest = Math.floor(value / 128)
  return rest ? [value % 128 + 128, ...leb(rest)] : [value]
}

const EXPORTS = 7
const parts = [bytes.subarray(0, 8)]
for (let at = 8; at < bytes.length;) {
  const start = at
  const id = bytes[at]
  const [length, begin] = number(at + 1)
  at = begin + length
  if (id !== EXPORTS) {
    parts.push(bytes.subarray(start, at))
    continue
  }
  let [count, next] = number(begin)
  const kept = []
  for (; count > 0; count--) {
    const [nameLength, name] = number(next)
    const [, end] = number(name + nameLength + 1)
    if (!bytes.toString('utf8', name, name + nameLength).startsWith(prefix)) kept.push(bytes.subarray(next, end))
    next = end
  }
  const section = Buffer.concat([Buffer.from(leb(kept.length)), ...kept])
  parts.push(Buffer.from([EXPORTS, ...leb(section.length)]), section)
}
writeFileSync(path, Buffer.concat(parts))

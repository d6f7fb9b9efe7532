// Compiles src to dist. `scripts/build-web.sh` of the repository puts the engine into dist/wasm; --no-wasm
// doesn't look for it.
import { execFileSync } from 'node:child_process'
import { copyFileSync, existsSync, mkdirSync, writeFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

const root = new URL('..', import.meta.url)
const at = path => fileURLToPath(new URL(path, root))
execFileSync(process.execPath, [at('node_modules/typescript/bin/tsc'), '-p', at('tsconfig.json')], { stdio: 'inherit' })
copyFileSync(at('src/engine.d.ts'), at('dist/engine.d.ts'))
if (!existsSync(at('dist/wasm-threads/sterna_web_bg.wasm'))) {
  // Bundlers refuse an import of nothing.
  mkdirSync(at('dist/wasm-threads'), { recursive: true })
  writeFileSync(at('dist/wasm-threads/sterna_web.js'), "// This package has no build with threads.\nexport default () => Promise.reject(new Error('no build with threads'))\n")
}
if (!process.argv.includes('--no-wasm')) {
  if (!existsSync(at('dist/wasm/sterna_web_bg.wasm'))) {
    console.error("No engine in dist/wasm: run scripts/build-web.sh in the repository's root.")
    process.exitCode = 1
  }
}

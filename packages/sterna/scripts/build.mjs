// Compiles src to dist. `scripts/build-web.sh` of the repository puts the engine's builds into dist/wasm*;
// --no-wasm doesn't look for them.
import { execFileSync } from 'node:child_process'
import { copyFileSync, existsSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

const root = new URL('..', import.meta.url)
const at = path => fileURLToPath(new URL(path, root))
execFileSync(process.execPath, [at('node_modules/typescript/bin/tsc'), '-p', at('tsconfig.json')], { stdio: 'inherit' })
for (const name of ['engine', 'constraint']) copyFileSync(at(`src/${name}.d.ts`), at(`dist/${name}.d.ts`))
if (!process.argv.includes('--no-wasm')) {
  for (const build of ['wasm', 'wasm-relaxed', 'wasm-threads', 'wasm-threads-relaxed']) {
    if (existsSync(at(`dist/${build}/sterna_web_bg.wasm`))) continue
    console.error(`No engine in dist/${build}: run scripts/build-web.sh in the repository's root.`)
    process.exitCode = 1
  }
}

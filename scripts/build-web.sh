#!/usr/bin/env bash
# Makes the engine of the npm package, packages/sterna/dist/wasm: the library in WebAssembly with its bindings.
#
#   build-web.sh [--dev]      --dev: quickly, without optimising the module for size and speed a second time
#
# Needs rustup with the target wasm32-unknown-unknown (where rustup can't fetch that, scripts/wasm-toolchain.sh
# makes a toolchain from Debian's packages). Takes wasm-bindgen from crates.io in the version of Cargo.lock, and
# wasm-opt from packages/sterna/node_modules where `npm install` has put it.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}
out=packages/sterna/dist/wasm
profile=wasm
[ "${1:-}" != --dev ] || profile=wasm-dev

if rustup target add wasm32-unknown-unknown; then
  wasm=(cargo)
else
  scripts/wasm-toolchain.sh wasm
  wasm=(cargo +wasm)
fi

version=$(sed -n '/^name = "wasm-bindgen"$/{n;s/^version = "\(.*\)"$/\1/p}' Cargo.lock)
tools=$target/web-tools
if [ "$("$tools/bin/wasm-bindgen" --version 2>/dev/null)" != "wasm-bindgen $version" ]; then
  # Into a target of its own: its dependencies are no others'.
  cargo install wasm-bindgen-cli --version "$version" --no-default-features --root "$tools" \
    --target-dir "$tools/target" --quiet
fi

RUSTFLAGS="${RUSTFLAGS:-} -Ctarget-feature=+simd128" \
  "${wasm[@]}" build --target wasm32-unknown-unknown --profile "$profile" -p sterna-web
mkdir -p "$out"
"$tools/bin/wasm-bindgen" --target web --no-typescript --remove-name-section --remove-producers-section --out-dir "$out" \
  "$target/wasm32-unknown-unknown/$profile/sterna_web.wasm"

module=$out/sterna_web_bg.wasm
wasm_opt=packages/sterna/node_modules/.bin/wasm-opt
if [ "$profile" = wasm ] && [ -x "$wasm_opt" ]; then
  "$wasm_opt" -O3 --enable-simd --enable-bulk-memory --enable-nontrapping-float-to-int --enable-sign-ext \
    --enable-mutable-globals --enable-reference-types --enable-multivalue --enable-bulk-memory-opt \
    "$module" -o "$module.opt"
  mv "$module.opt" "$module"
fi
for file in "$module" "$out/sterna_web.js"; do
  brotli=$(node -e 'const z=require("zlib"),f=require("fs");console.log(z.brotliCompressSync(f.readFileSync(process.argv[1])).length)' "$file")
  printf '%s: %d bytes, %d in brotli\n' "$file" "$(stat -c %s "$file")" "$brotli"
done

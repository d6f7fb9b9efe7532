#!/usr/bin/env bash
# Makes the engine of the npm package: the library in WebAssembly with its bindings, in packages/sterna/dist/wasm, with
# relaxed SIMD in dist/wasm-relaxed, with threads that share memory in dist/wasm-threads, and with both in
# dist/wasm-threads-relaxed; and what the first schema loads, in dist/wasm-constraint.
#
#   build-web.sh [--dev]      --dev: quickly, without optimising across crates or for size, without relaxed SIMD, and
#                             without saying how large the modules are in brotli
#
# Needs rustup with the target wasm32-unknown-unknown, and the sources of the standard library, which is compiled
# again: for threads, to be small, and because nothing in a browser would show the message of a panic (where rustup
# can't fetch them, scripts/wasm-toolchain.sh makes toolchains from Debian's packages, and larger modules). Takes
# wasm-bindgen from crates.io in the version of Cargo.lock, and wasm-opt from packages/sterna/node_modules where
# `npm install` has put it.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}
dist=packages/sterna/dist
profile=wasm
[ "${1:-}" != --dev ] || profile=wasm-dev

version=$(sed -n '/^name = "wasm-bindgen"$/{n;s/^version = "\(.*\)"$/\1/p}' Cargo.lock)
tools=$target/web-tools
if [ "$("$tools/bin/wasm-bindgen" --version 2>/dev/null)" != "wasm-bindgen $version" ]; then
  # Into a target of its own: its dependencies are no others'. Five modules take less time to bind than it takes to
  # optimise what binds them.
  quick=()
  [ "$profile" = wasm ] || quick=(env CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_LTO=off)
  "${quick[@]}" cargo install wasm-bindgen-cli --version "$version" --no-default-features --bin wasm-bindgen \
    --root "$tools" --target-dir "$tools/target" --quiet
fi

# module NAME [CRATE]: binds what was compiled, and says how large it is.
#
# wasm-opt is for the module of constraints alone, which has what another interface exports. It makes the engine no
# smaller in brotli, and with -O3 slower: a token of an answer took 1.3 to 1.8 times as long.
module() {
  local out=$dist/$1 crate=${2:-sterna_web}
  mkdir -p "$out"
  "$tools/bin/wasm-bindgen" --target web --no-typescript --remove-name-section --remove-producers-section \
    --out-dir "$out" "$target/web/wasm32-unknown-unknown/$profile/$crate.wasm"
  local wasm=$out/${crate}_bg.wasm wasm_opt=packages/sterna/node_modules/.bin/wasm-opt file brotli
  if [ "$crate" = sterna_constraint_web ]; then
    node packages/sterna/scripts/without-exports.mjs "$wasm" llg_
    if [ "$profile" = wasm ] && [ -x "$wasm_opt" ]; then
      "$wasm_opt" -O3 --enable-simd --enable-bulk-memory --enable-nontrapping-float-to-int --enable-sign-ext \
        --enable-mutable-globals --enable-reference-types --enable-multivalue --enable-bulk-memory-opt \
        "$wasm" -o "$wasm.opt"
      mv "$wasm.opt" "$wasm"
    fi
  fi
  for file in "$wasm" "$out/$crate.js"; do
    if [ "$profile" != wasm ]; then
      printf '%s: %d bytes\n' "$file" "$(stat -c %s "$file")"
      continue
    fi
    brotli=$(node -e 'const z=require("zlib"),f=require("fs");console.log(z.brotliCompressSync(f.readFileSync(process.argv[1])).length)' "$file")
    printf '%s: %d bytes, %d in brotli\n' "$file" "$(stat -c %s "$file")" "$brotli"
  done
}

# The features of the two kinds of modules, and what is added to their folders' names. The quick build has one kind,
# under both names.
simd=("+simd128" "+simd128,+relaxed-simd")
suffix=("" "-relaxed")
kinds=(0 1)
[ "$profile" = wasm ] || kinds=(0)
# both FOLDER
both() {
  if ((${#kinds[@]} == 1)); then
    rm -rf "$dist/$1-relaxed"
    cp -r "$dist/$1" "$dist/$1-relaxed"
  fi
}

# Only unstable Cargo compiles the standard library, which must have atomics too where there are threads. Panics trap
# without a message.
std=(env RUSTC_BOOTSTRAP=1 cargo -Zbuild-std=std,panic_abort -Zbuild-std-features=optimize_for_size)
plain=("${std[@]}") threads=("${std[@]}")
small="-Zunstable-options -Cpanic=immediate-abort"
if [ "$profile" != wasm ]; then
  plain=(cargo) small=
fi
if ! rustup target add wasm32-unknown-unknown || ! rustup component add rust-src; then
  scripts/wasm-toolchain.sh wasm wasm-threads
  plain=(cargo +wasm) threads=(cargo +wasm-threads)
  small=
fi
# Into one folder, which keeps what the builds have in common, such as macros.
build=(build --target wasm32-unknown-unknown --profile "$profile" --target-dir "$target/web")
flags="${RUSTFLAGS:-} $small"
for i in "${kinds[@]}"; do
  RUSTFLAGS="$flags -Ctarget-feature=${simd[i]}" \
    "${plain[@]}" "${build[@]}" -p sterna-web
  module "wasm${suffix[i]}"
done
both wasm
# By itself: together with the engine, its dependencies would have the features that either needs. Grammars are read
# recursively: its stack should not end before the browser's.
RUSTFLAGS="$flags -Ctarget-feature=+simd128 -Clink-arg=-zstack-size=4194304" \
  "${plain[@]}" "${build[@]}" -p sterna-constraint-web
module wasm-constraint sterna_constraint_web

links=(--shared-memory --import-memory --max-memory=4294967296
  --export=__wasm_init_tls --export=__tls_size --export=__tls_align --export=__tls_base)
for i in "${kinds[@]}"; do
  RUSTFLAGS="$flags -Ctarget-feature=${simd[i]},+atomics,+bulk-memory,+mutable-globals ${links[*]/#/-Clink-arg=}" \
    "${threads[@]}" "${build[@]}" -p sterna-web
  module "wasm-threads${suffix[i]}"
done
both wasm-threads

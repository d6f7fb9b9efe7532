#!/usr/bin/env bash
# What .ci/run leaves out for its time: the release build, the npm package as it is published with all of its tests in
# browsers, the oldest Rust, macOS, Miri, and Windows under Wine.
#
# Needs what .ci/run needs; besides, from rustup: x86_64-pc-windows-gnu and aarch64-apple-darwin, the oldest
# toolchain that Cargo.toml promises, nightly with miri and rust-src; from Debian's packages MinGW and Wine.
# A step that lacks something is skipped, aloud.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}

ran=() skipped=() running=

summary() {
  local status=$?
  printf '\n== Summary\n'
  ((${#ran[@]} == 0)) || printf '%s\n' "${ran[@]}"
  ((${#skipped[@]} == 0)) || printf 'SKIPPED  %s\n' "${skipped[@]}"
  ((status == 0)) || printf ' FAILED  %s\n' "${running:-preparation}"
  printf '%5d s  in all\n' $SECONDS
}
trap summary EXIT

# step NAME COMMAND...: runs and times it; what fails ends the run.
step() {
  local start=$SECONDS
  running=$1
  printf '\n== %s\n' "$1"
  shift
  "$@"
  ran+=("$(printf '%5d s  %s' $((SECONDS - start)) "$running")")
  running=
}

# skip NAME REASON
skip() {
  printf '\n== SKIPPED %s: %s\n' "$1" "$2"
  skipped+=("$1: $2")
}

# debian COMMAND=PACKAGE...: installs packages whose commands are missing; false where that can't be.
debian() {
  local missing=() pair
  for pair; do command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}"); done
  ((${#missing[@]})) || return 0
  command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || return 1
  apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# Wine 8, which is Debian's, lacks the library from which Rust's programs have random numbers.
random_numbers_for_wine() {
  local library
  library=$(mktemp -d)/bcryptprimitives.dll
  x86_64-w64-mingw32-gcc -shared -x c - -o "$library" -ladvapi32 <<'C'
unsigned char __stdcall SystemFunction036(void *, unsigned long);
__declspec(dllexport) int __stdcall ProcessPrng(void *bytes, unsigned long long n) {
  return SystemFunction036(bytes, (unsigned long)n);
}
C
  wine64 wineboot --init
  cp -n "$library" "${WINEPREFIX:-$HOME/.wine}/drive_c/windows/system32/"
}

tale() {
  local tale
  tale=$("$@" run -p "Tell me a story about a fox named Ruby." --seed 1 --backend cpu)
  printf '%s\n' "$tale"
  grep -q Ruby <<<"$tale"
}
step "release build" cargo build --release -p sterna-cli
if driver=$(scripts/software-gpu.sh); then
  step "kernels for GPUs with every mix of features" env "$driver" STERNA_REQUIRE_GPU=1 LP_NUM_THREADS=0 \
    STERNA_EVERY_VARIANT=1 cargo test -p sterna-gpu
else
  skip "kernels for GPUs with every mix of features" "no software driver for Vulkan"
fi
step "a tale of the release" tale "$target/release/sterna"

# The npm package as it is published. Then models of every family on a browser's GPU, and GPUs that compute each kernel of
# a model wrongly: on a software adapter they take long.
npm_package() (
  cd packages/sterna
  npm run build
  npm run gates
)
if command -v node >/dev/null; then
  # With wasm-opt, which it takes for the module of constraints.
  step "what the npm package is built with" npm --prefix packages/sterna ci --no-audit --no-fund
  step "the engine of the npm package" scripts/build-web.sh
  step "the npm package" npm_package
  step "the npm package in browsers, all of it" env STERNA="$target/release/sterna" \
    node packages/sterna/test/browser/run.mjs --all
else
  skip "the npm package" "no Node.js"
fi

oldest=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
if rustup toolchain install "$oldest" --profile minimal --no-self-update; then
  step "Rust $oldest" cargo "+$oldest" check --workspace --exclude sterna-cli --locked
else
  skip "Rust $oldest" "rustup has no such toolchain"
fi

# Nothing is linked, so dependencies in C needn't be compiled, for which Apple's headers lack.
if rustup target add aarch64-apple-darwin; then
  step "macOS" env CC_aarch64_apple_darwin=true AR_aarch64_apple_darwin=true \
    cargo check --target aarch64-apple-darwin --workspace
  # Instructions that are written out meet an assembler.
  step "macOS kernels" cargo build --target aarch64-apple-darwin -p sterna-kernels
else
  skip "macOS" "rustup has no aarch64-apple-darwin"
fi

# The threads of the pool and the slices they share; much else would take hours.
if rustup toolchain install nightly --profile minimal --no-self-update -c miri -c rust-src; then
  step "Miri" cargo +nightly miri test -p sterna-kernels --lib pool::
else
  skip "Miri" "rustup has no nightly toolchain with it"
fi

if ! rustup target add x86_64-pc-windows-gnu; then
  skip "Windows" "rustup has no x86_64-pc-windows-gnu"
elif ! debian x86_64-w64-mingw32-gcc=gcc-mingw-w64-x86-64; then
  skip "Windows" "no MinGW"
else
  step "Windows build" cargo build --target x86_64-pc-windows-gnu -p sterna-cli
  # Debian's package has no command of that name.
  if PATH+=:/usr/lib/wine && debian wine64=wine64; then
    export WINEDEBUG=-all
    step "Wine" random_numbers_for_wine
    step "a tale on Windows" tale wine64 "$target/x86_64-pc-windows-gnu/debug/sterna.exe"
    step "worker on Windows" env CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER=wine64 \
      cargo test --target x86_64-pc-windows-gnu -p sterna-cli --test it worker
  else
    skip "a tale and the worker on Windows" "no Wine"
  fi
fi

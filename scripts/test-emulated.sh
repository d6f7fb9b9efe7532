#!/usr/bin/env bash
# test-emulated.sh - test the kernels, and check receipts, with instruction sets that this machine doesn't have.
#
# 64-bit Arm runs under QEMU, as a processor with everything and as one without dot products;
# WebAssembly runs in Node.js, with and without relaxed SIMD (one build has both). Both must come to the
# hashes in src/golden.rs, which x86-64 comes to, and pass the tests of kernels that have instructions
# of their own there; emulated, all tests would take many minutes. Receipts in testdata/receipts, which were
# written with AVX-512, are to check on both. Compilers and emulators come from
# rustup and, on Debian, from its packages; what can't be had is skipped, and said.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'test-emulated: %s\n' "$*"; }

# Installs Debian packages, given as COMMAND=PACKAGE, whose commands are missing.
need() {
  local missing=() pair sudo=
  for pair; do command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}"); done
  ((${#missing[@]})) || return 0
  command -v apt-get >/dev/null || return 1
  [ "$(id -u)" = 0 ] || sudo=sudo
  say "installing ${missing[*]}"
  $sudo apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends \
      "${missing[@]}" libc6-dev-arm64-cross >/dev/null
}

arm() {
  local target=aarch64-unknown-linux-gnu
  local runner="qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu"
  rustup target add $target || { say "skipped Arm: rustup has no $target"; return 0; }
  need qemu-aarch64=qemu-user aarch64-linux-gnu-gcc=gcc-aarch64-linux-gnu ||
    { say "skipped Arm: no QEMU or no linker"; return 0; }
  export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
  # `max` has the dot products and matrix products of bytes, Cortex-A53 neither.
  say "Arm, max"
  CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$runner max" \
    cargo test --quiet -p sterna-kernels --lib --target $target -- "${filters[@]}"
  say "Arm, cortex-a53"
  CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$runner cortex-a53" \
    cargo test --quiet -p sterna-kernels --lib --target $target -- these_bits
  say "receipts on Arm"
  CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$runner max" check_receipts $target
}

# check_receipts TARGET
check_receipts() {
  cargo run --quiet -p sterna-testing --no-default-features --features receipts --bin check-receipts --target "$1"
}

wasm() {
  local target=wasm32-wasip1 node=(node --no-warnings) major
  rustup target add $target || { say "skipped WebAssembly: rustup has no $target"; return 0; }
  major=$(node -p 'process.versions.node.split(".")[0]' || echo 0)
  ((major >= 20)) || { say "skipped WebAssembly: no Node.js 20 or newer"; return 0; }
  # Before 21 relaxed SIMD was an experiment, and the quick compiler got its dot product wrong.
  ((major >= 21)) || node+=(--experimental-wasm-relaxed-simd --no-liftoff)
  export CARGO_TARGET_WASM32_WASIP1_RUSTFLAGS="-Ctarget-feature=+simd128,+relaxed-simd"
  export CARGO_TARGET_WASM32_WASIP1_RUNNER="${node[*]} $PWD/scripts/wasi-run.mjs"
  say "WebAssembly"
  cargo test --quiet -p sterna-kernels --lib --target $target -- "${filters[@]}"
  say "receipts in WebAssembly"
  check_receipts $target
}

# Tests of products, in which instructions of the targets are, and of the hashes.
filters=(gemm::ternary gemm::integer gemm::float these_bits)

arm
wasm

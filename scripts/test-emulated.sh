#!/usr/bin/env bash
# test-emulated.sh - test the kernels, and check receipts, with instruction sets that this machine doesn't have.
#
# 64-bit Arm runs under QEMU, as a processor with everything, with a QEMU whose outer products (SME) are right, and as one
# without dot products;
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

# Prints the path of a QEMU for 64-bit Arm that gets outer products right, which that of Debian 12 doesn't: one that is
# installed, or Debian 13's, unpacked under target/ and not installed: it is linked statically.
qemu_with_sme() {
  local major folder=$PWD/target/qemu list
  major=$(qemu-aarch64 --version | sed -n 's/^qemu-aarch64 version \([0-9]*\).*/\1/p')
  if ((${major:-0} >= 10)); then command -v qemu-aarch64; return; fi
  if [ ! -x "$folder/usr/bin/qemu-aarch64" ]; then
    local keys=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -e $keys ] && command -v apt-get >/dev/null && [ "$(uname -m)" = x86_64 ] || return 1
    # Cargo splits the runner at spaces.
    [[ $folder != *' '* ]] || return 1
    rm -rf "$folder"
    mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
    list=$folder/sources.list
    echo "deb [signed-by=$keys] http://deb.debian.org/debian trixie main" >"$list"
    local options=(-qq -o Dir::Etc::SourceList="$list" -o Dir::Etc::SourceParts=- -o Dir::State::Lists="$folder/lists"
      -o Dir::Cache="$folder/cache" -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none)
    apt-get "${options[@]}" update >&2 && (cd "$folder" && apt-get "${options[@]}" download qemu-user >&2) &&
      dpkg -x "$folder"/qemu-user_*.deb "$folder/unpacked" && mkdir -p "$folder/usr/bin" &&
      mv "$folder/unpacked/usr/bin/qemu-aarch64" "$folder/usr/bin/" || return 1
    rm -rf "$folder"/{unpacked,lists,cache} "$folder"/qemu-user_*.deb
  fi
  echo "$folder/usr/bin/qemu-aarch64"
}

arm() {
  local target=aarch64-unknown-linux-gnu
  local runner="qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu"
  rustup target add $target || { say "skipped Arm: rustup has no $target"; return 0; }
  need qemu-aarch64=qemu-user aarch64-linux-gnu-gcc=gcc-aarch64-linux-gnu ||
    { say "skipped Arm: no QEMU or no linker"; return 0; }
  export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
  # `max` has the dot products, matrix products and outer products of bytes, Cortex-A53 none.
  local qemu
  if qemu=$(qemu_with_sme); then
    runner="$qemu ${runner#* }"
    export STERNA_REQUIRE_ISA=sme
  else
    say "skipped SME: no QEMU 10"
  fi
  say "Arm, max"
  CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$runner max" \
    cargo test --quiet -p sterna-kernels --lib --target $target -- "${filters[@]}" a_level_that_is_required
  unset STERNA_REQUIRE_ISA
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

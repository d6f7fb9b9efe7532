#!/usr/bin/env bash
# The built-in model in WebAssembly under Node.js, its files given in pieces: the same tokens as natively, and receipts
# that were written with AVX-512 check, unless they are changed.
# Needs the engine of the npm package, which scripts/build-web.sh makes.
# STERNA is the native program to compare with, built here if it isn't set.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
model=crates/sterna/models/tiny-tales
if [ -z "${STERNA:-}" ]; then
  cargo build -p sterna-cli
  STERNA=$target/debug/sterna
fi
prompt="Tell me a story about a fox named Ruby."
for settings in "0 1 1000" "0 1 3000000" "0.8 7 65536"; do
  read -r temperature seed piece <<<"$settings"
  there=$(node crates/web/node.mjs "$model" "$prompt" "$temperature" "$seed" "$piece")
  here=$("$STERNA" run "$model" -p "$prompt" --temperature "$temperature" --seed "$seed" --json \
    --backend cpu --threads 1 | python3 -c 'import json,sys; print(json.dumps(json.load(sys.stdin)["ids"], separators=(",", ":")))')
  [ "$there" = "$here" ] || { echo "temperature $temperature: $there in WebAssembly, $here natively"; exit 1; }
  echo "temperature $temperature, pieces of $piece bytes: the same $(tr -cd , <<<"$here" | wc -c) tokens and one"
done
changed=$(mktemp)
trap 'rm -f "$changed"' EXIT
for receipt in testdata/receipts/*.json; do
  said=$(node crates/web/node.mjs "$model" --check "$receipt")
  [ "$said" = '{"ok":true}' ] || { echo "$receipt: $said"; exit 1; }
  python3 - "$receipt" "$changed" <<'EOF'
import json, sys
receipt = json.load(open(sys.argv[1]))
receipt["answer"][2] += 1
json.dump(receipt, open(sys.argv[2], "w"))
EOF
  said=$(node crates/web/node.mjs "$model" --check "$changed")
  grep -q '"ok":false.*"index":2' <<<"$said" || { echo "$receipt, changed: $said"; exit 1; }
  echo "$receipt: the same bits; with another token: not"
done

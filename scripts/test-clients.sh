#!/usr/bin/env bash
# Clients and judges of others against a server of the built-in model.
#   scripts/test-clients.sh [light]
#
# `light` leaves out what takes longer or is large: schemathesis, gateways, Ray, compatcanary, Codex.
# Needs the program (cargo build --release -p sterna-cli, or STERNA=path), Python 3.10 with PyPI, and Node.js 20 with
# npm; says "skipped: …" of what can't be had.
set -euo pipefail
cd "$(dirname "$0")/.."
light=${1:-}
target=${CARGO_TARGET_DIR:-$PWD/target}
sterna=${STERNA:-$target/release/sterna}
[ -x "$sterna" ] || { echo "skipped: clients of others, for there is no program at $sterna"; exit 0; }

scratch=$(mktemp -d)
server=''
stop() {
  [ -z "$server" ] || kill "$server" 2>/dev/null || true
  server=''
}
trap 'stop; rm -rf "$scratch"' EXIT

# serve CONTEXT: a server of the built-in model; its address is in $url.
serve() {
  stop
  : >"$scratch/address"
  "$sterna" serve builtin --no-files --ctx "$1" --port 0 >"$scratch/address" 2>"$scratch/log" &
  server=$!
  for _ in $(seq 300); do
    [ -s "$scratch/address" ] && break
    sleep 0.1
  done
  url=$(head -1 "$scratch/address")v1
}

# With room for the tools that judges tell of, which the model's vocabulary makes long.
serve 4096
failed=0

wheels=('llm-comply==0.5.*' 'openai==3.*' 'anthropic==2.*')
[ -n "$light" ] || wheels+=('schemathesis==4.*')
venv=$target/client-tests
if { python3 -m venv "$venv" && "$venv/bin/pip" install -q "${wheels[@]}"; } >"$scratch/pip" 2>&1; then
  "$venv/bin/python" scripts/test-clients.py "$url" || failed=1
  # Without the cases of images and of thinking, which the model has neither of.
  for format in openai-chat anthropic open-responses; do
    case $format in
      openai-chat) cases=chat-basic-response,chat-system-prompt,chat-multi-turn,chat-tool-calling,chat-streaming-response,chat-streaming-usage,chat-error-handling ;;
      anthropic) cases=anth-basic-response,anth-system-prompt,anth-multi-turn,anth-tool-calling,anth-streaming-response,anth-streaming-usage,anth-error-handling ;;
      open-responses) cases=basic-response,system-prompt,multi-turn,tool-calling,streaming-response,streaming-usage,assistant-phase,response-output-phase-schema,compact-missing-model,error-handling ;;
    esac
    "$venv/bin/llm-comply" --base-url "$url" --model builtin --api-key none --format "$format" \
      --filter "$cases" || failed=1
  done
  # Requests made up from the document. What no schema can say (ids beyond the vocabulary, two grammars at once, the
  # name of a tool that isn't there) is refused though the schema has it. What it keeps between runs goes with the rest.
  if [ -z "$light" ]; then
    (
      cd "$scratch"
      "$venv/bin/schemathesis" run "${url%v1}openapi.json" --max-examples "${EXAMPLES:-30}" --request-timeout 60 \
        --no-color --exclude-checks positive_data_acceptance
    ) || failed=1
  fi
else
  tail -3 "$scratch/pip"
  echo "skipped: Python clients, whose packages can't be installed"
fi

# Gateways of others before two servers of their own.
if [ -z "$light" ]; then
  gateways=$target/gateway-tests
  wheels=('smg==1.*' 'vllm-router==0.1.*')
  if { python3 -m venv "$gateways" && "$gateways/bin/pip" install -q "${wheels[@]}"; } >"$scratch/pip" 2>&1; then
    python3 scripts/test-gateways.py "$sterna" "$gateways/bin/smg" "$gateways/bin/vllm-router" || failed=1
  else
    tail -3 "$scratch/pip"
    echo "skipped: gateways, whose packages can't be installed"
  fi
fi

# A batch job and an API server on Ray, by the Python client.
if [ -z "$light" ]; then
  venv=$target/ray-tests
  if { python3 -m venv "$venv" && "$venv/bin/pip" install -q 'ray[data,serve]==2.*'; } >"$scratch/pip" 2>&1; then
    for test in ray_nodes ray_serving; do
      (cd clients/python && STERNA_PROGRAM=$(realpath "$sterna") "$venv/bin/python" -m tests.$test) || failed=1
    done
  else
    tail -3 "$scratch/pip"
    echo "skipped: the Python client on Ray, which can't be installed"
  fi
fi

# packages FOLDER PACKAGE...: has them of npm, in a folder that is kept.
packages() {
  local folder=$1
  shift
  mkdir -p "$folder"
  echo '{"private": true, "type": "module"}' >"$folder/package.json"
  (cd "$folder" && npm install --no-audit --no-fund --loglevel error "$@") >"$scratch/npm" 2>&1
}
if ! command -v npm >/dev/null; then
  echo 'skipped: JavaScript clients, without Node.js'
  exit "$failed"
fi
clients=$target/client-tests-js
if packages "$clients" openai@7 @anthropic-ai/sdk@1 ai@7 @ai-sdk/openai-compatible@2 @ai-sdk/anthropic@3; then
  cp scripts/test-clients.mjs "$clients"
  node "$clients/test-clients.mjs" "$url" || failed=1
else
  tail -3 "$scratch/npm"
  echo "skipped: JavaScript clients, whose packages can't be installed"
fi
[ -z "$light" ] || exit "$failed"

if packages "$target/compatcanary" compatcanary@0.2; then
  for profile in chat modern; do
    OPENAI_API_KEY=none "$target/compatcanary/node_modules/.bin/compatcanary" scan --base-url "$url" --model builtin \
      --profile "$profile" || failed=1
  done
else
  echo 'skipped: compatcanary, which npm cannot get here'
fi
if packages "$target/codex" @openai/codex@0; then
  # What Codex says of itself and of its tools is thousands of tokens.
  serve 65536
  node scripts/test-codex.mjs "$url" "$target/codex/node_modules/.bin/codex" || failed=1
else
  echo 'skipped: Codex, which npm cannot get here'
fi
exit "$failed"

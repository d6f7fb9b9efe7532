#!/usr/bin/env bash
# Clients and judges of others against a server of the built-in model.
#
# Needs the program (cargo build --release -p sterna-cli, or STERNA=path), Python 3.10 with PyPI, and npm; says
# "skipped" where packages can't be had.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}
sterna=${STERNA:-$target/release/sterna}
[ -x "$sterna" ] || { echo "skipped: no program at $sterna"; exit 0; }

scratch=$(mktemp -d)
server=''
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$scratch"' EXIT

packages=('llm-comply==0.5.*' 'openai==3.*' 'anthropic==2.*' 'schemathesis==4.*')
venv=$target/client-tests
if ! { python3 -m venv "$venv" && "$venv/bin/pip" install -q "${packages[@]}"; } >"$scratch/pip" 2>&1; then
  tail -3 "$scratch/pip"
  echo 'skipped: the Python packages of clients cannot be installed'
  exit 0
fi

# With room for the tools that judges tell of, which the model's vocabulary makes long.
"$sterna" serve builtin --no-files --ctx 4096 --port 0 >"$scratch/address" 2>"$scratch/log" &
server=$!
for _ in $(seq 100); do
  [ -s "$scratch/address" ] && break
  sleep 0.1
done
url=$(head -1 "$scratch/address")v1

"$venv/bin/python" scripts/test-clients.py "$url"
# Without the cases of images and of thinking, which the model has neither of.
failed=0
for format in openai-chat anthropic open-responses; do
  case $format in
    openai-chat) cases=chat-basic-response,chat-system-prompt,chat-multi-turn,chat-tool-calling,chat-streaming-response,chat-streaming-usage,chat-error-handling ;;
    anthropic) cases=anth-basic-response,anth-system-prompt,anth-multi-turn,anth-tool-calling,anth-streaming-response,anth-streaming-usage,anth-error-handling ;;
    open-responses) cases=basic-response,system-prompt,multi-turn,tool-calling,streaming-response,streaming-usage,assistant-phase,response-output-phase-schema,compact-missing-model,error-handling ;;
  esac
  "$venv/bin/llm-comply" --base-url "$url" --model builtin --api-key none --format "$format" \
    --filter "$cases" || failed=1
done

# Requests made up from the document. What no schema can say (ids beyond the vocabulary, two grammars at once, the name
# of a tool that isn't there) is refused though the schema has it. What it keeps between runs goes with the rest.
(
  cd "$scratch"
  "$venv/bin/schemathesis" run "${url%v1}openapi.json" --max-examples "${EXAMPLES:-30}" --request-timeout 60 \
    --no-color --exclude-checks positive_data_acceptance
) || failed=1

if command -v npx >/dev/null && npx --yes compatcanary@0.2 --version >/dev/null 2>&1; then
  for profile in chat modern; do
    OPENAI_API_KEY=none npx --yes compatcanary@0.2 scan --base-url "$url" --model builtin --profile "$profile" || failed=1
  done
else
  echo 'skipped: compatcanary, which npm cannot get here'
fi
exit "$failed"

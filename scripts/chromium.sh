#!/usr/bin/env bash
# Debian's Chromium, installed with apt where it lacks (as root). Fails where there is none.
set -euo pipefail
command -v chromium >/dev/null && exit
command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
command -v chromium >/dev/null

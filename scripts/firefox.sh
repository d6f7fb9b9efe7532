#!/usr/bin/env bash
# Debian's Firefox, installed with apt where it lacks (as root). Fails where there is none.
set -euo pipefail
command -v firefox-esr >/dev/null && exit
command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends firefox-esr >/dev/null
command -v firefox-esr >/dev/null

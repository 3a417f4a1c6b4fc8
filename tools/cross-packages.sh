#!/usr/bin/env bash
# Makes sure that commands are there, or says plainly what is missing: `cross-packages.sh COMMAND=PACKAGE ...`.
# For what only `make cross` and `make arm` need; nothing is touched when all is there.
set -euo pipefail
source "$(dirname "$0")/apt.sh"

missing() {
  local pair
  for pair in "$@"; do command -v "${pair%%=*}" > /dev/null || echo "${pair#*=}"; done
}

mapfile -t wanted < <(missing "$@")
((${#wanted[@]} == 0)) || install_packages "${wanted[@]}"
mapfile -t wanted < <(missing "$@")
((${#wanted[@]} == 0)) || fail "missing: ${wanted[*]} (Debian's packages); install them, then run make again"

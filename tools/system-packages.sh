#!/usr/bin/env bash
# Makes sure the machine has what the build needs from outside Python, or says plainly what is missing.
#
# Missing packages are installed by apt when this runs as root; nothing is touched when all is there. Without liburing
# there is no io_uring backend; without xxHash's headers, tools/xxhash-headers.sh gets them with pip. The tests of two
# nodes need iproute2.
set -euo pipefail

python=${PYTHON:-python3}
cxx=${CXX:-c++}

source "$(dirname "$0")/apt.sh"

command -v "$python" > /dev/null || fail "no $python found; Everystep needs Python 3.10 or newer"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
  || fail "$("$python" --version) is too old; Everystep needs Python 3.10 or newer (make PYTHON=python3.12 ...)"
command -v "$cxx" > /dev/null || fail "no C++ compiler ($cxx) found; install g++ or clang, or set CXX"

has_header() { printf '#include <%s>\n' "$1" | "$cxx" -E -x c++ - > /dev/null 2>&1; }
has_python_headers() {
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}
has_venv() { "$python" -c 'import ensurepip, venv' > /dev/null 2>&1; }

missing_packages() {
  has_header liburing.h || echo liburing-dev
  has_header xxhash.h || echo libxxhash-dev
  has_python_headers || echo python3-dev
  [[ -x .venv/bin/python ]] || has_venv || echo python3-venv
  command -v ip > /dev/null || echo iproute2
}

mapfile -t wanted < <(missing_packages)
if ((${#wanted[@]} == 0)); then
  exit 0
fi

install_packages "${wanted[@]}"

mapfile -t wanted < <(missing_packages)
for package in "${wanted[@]}"; do
  case $package in
    liburing-dev)
      say "liburing is missing: the build goes on without the io_uring backend (install liburing-dev to have it)"
      ;;
    libxxhash-dev) say "xxhash.h is missing: its headers will come from the source package on the Python index" ;;
    iproute2) say "ip is missing: the tests of two nodes will be skipped (install iproute2 to run them)" ;;
    python3-dev) fail "Python.h is missing: install the development files of $python (python3-dev), then run make again" ;;
    python3-venv) fail "$python cannot create virtual environments: install python3-venv, then run make again" ;;
  esac
done

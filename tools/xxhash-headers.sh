#!/usr/bin/env bash
# For machines where you may not install system packages: xxHash's headers from the source package of its Python binding,
# into the virtual environment, where CMakeLists.txt looks too. Does nothing when the compiler finds them already.
set -euo pipefail

python=$1
cxx=${CXX:-c++}
if printf '#include <xxh3.h>\n' | "$cxx" -E -x c++ - > /dev/null 2>&1; then
  exit 0
fi
include=$("$python" -c 'import sys; print(sys.prefix)')/include
if [[ -f $include/xxh3.h ]]; then
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip --disable-pip-version-check download --quiet --no-deps --no-binary xxhash --dest "$work" xxhash \
  || { echo "setup: xxHash's headers could not be had: install libxxhash-dev, then run make again" >&2; exit 1; }
mkdir -p "$include"
tar -xzf "$work"/xxhash-*.tar.gz -C "$include" --strip-components=3 --wildcards '*/deps/xxhash/*.h'
echo "setup: xxHash's headers are in $include"

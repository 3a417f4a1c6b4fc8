#!/usr/bin/env bash
# For images that have neither (manylinux): a static liburing and xxHash's headers under PREFIX, from their own
# repositories, each at one commit. `wheel-libraries.sh PREFIX`; cibuildwheel calls it (pyproject.toml).
set -euo pipefail

prefix=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A commit's name is the digest of what it holds, so this is what we have looked at, or nothing.
get() {
  local name=$1 address=$2 commit=$3
  git init --quiet "$work/$name"
  git -C "$work/$name" fetch --quiet --depth 1 "$address" "$commit"
  git -C "$work/$name" checkout --quiet FETCH_HEAD
}

get liburing https://github.com/axboe/liburing e3d35ea59d3ba09075ed4d7751e4bb9049cce64a # 2.14
get xxhash https://github.com/Cyan4973/xxHash bbb27a5efb85b92a0486cf361a8635715a53f6ba  # 0.8.2

(cd "$work/liburing" && ./configure --prefix="$prefix" > /dev/null)
make -C "$work/liburing/src" ENABLE_SHARED=0 CFLAGS="-O2 -fPIC" install prefix="$prefix" includedir="$prefix/include" \
  libdevdir="$prefix/lib" libdir="$prefix/lib" > /dev/null
install -m 644 "$work/xxhash/xxhash.h" "$work/xxhash/xxh3.h" "$prefix/include/"

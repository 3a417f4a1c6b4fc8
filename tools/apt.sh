# Sourced: installs Debian packages where this may (as root, with apt-get), and says what it does.

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

install_packages() {
  if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
    return 0
  fi
  say "installing $*"
  local log package
  log=$(mktemp)
  # Each package on its own, so that one that cannot be had does not take the others with it.
  DEBIAN_FRONTEND=noninteractive apt-get update -qq > "$log" 2>&1 \
    || say "apt-get update failed; going on with the lists that are there"
  for package in "$@"; do
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >> "$log" 2>&1 \
      || { say "could not install $package:"; tail -n 5 "$log"; }
  done
  rm -f "$log"
}

# Shared by the scripts: where the project is, how to speak, how to build. Sourced, never run.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"

jobs=$(nproc 2>/dev/null || echo 2)

# All words of the scripts themselves go to stderr; stdout carries results.
say() { echo "== $*" >&2; }
die() {
  echo "error: $*" >&2
  exit 1
}

# build <preset> [target...]: configures once (ninja itself re-runs cmake when its files change), then builds.
build() {
  local preset=$1
  shift
  if [ ! -f "build/$preset/build.ninja" ]; then
    say "configuring build/$preset"
    cmake --preset "$preset" >&2
  fi
  say "building build/$preset${*:+ ($*)} with $jobs jobs"
  ninja -C "build/$preset" -j "$jobs" "$@" >&2
}

#!/usr/bin/env bash
# Installs into an empty prefix, then builds and runs a program that knows nothing but find_package(cadre).
#   install_test.sh CMAKE BUILD_DIR COMPILER
set -euo pipefail
cmake=$1
build=$2
compiler=$3
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cmake" --install "$build" --prefix "$work/prefix" >"$work/install.log"
for file in include/cadre/cadre.h bin/cadre share/cadre/tiny-moe/config.json; do
  [ -f "$work/prefix/$file" ] || { echo "not installed: $file"; exit 1; }
done
for header in "$here"/../../include/cadre/*.h; do
  cmp "$header" "$work/prefix/include/cadre/$(basename "$header")"
done

"$cmake" -G Ninja -S "$here/consumer" -B "$work/consumer" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_CXX_COMPILER="$compiler" >"$work/configure.log" 2>&1 ||
  { cat "$work/configure.log"; exit 1; }
# The source tree must not show through.
if grep -rl "$(cd "$here/../.." && pwd)/" "$work"/prefix/lib*/cmake/cadre; then
  echo "the package files name the source tree"
  exit 1
fi
"$cmake" --build "$work/consumer"

cd "$work"
"$work/consumer/consumer" "$work/prefix/share/cadre/tiny-moe"
"$work/prefix/bin/cadre" generate "The sea" --max-new-tokens 4 --quiet </dev/null

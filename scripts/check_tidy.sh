#!/usr/bin/env bash
# clang-tidy over our sources, findings are errors (.clang-tidy). Needs a configured build/ci.
#   scripts/check_tidy.sh           the .cc files that differ from main's last common commit, or all when none does
#   scripts/check_tidy.sh --all     all of them
#   scripts/check_tidy.sh FILE...   these
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

tidy=$(command -v clang-tidy-19) || die "clang-tidy-19 is missing: apt-get install clang-tidy-19"
[ -f build/ci/compile_commands.json ] || die "build/ci is not configured: cmake --preset ci"

if [ $# -gt 0 ] && [ "$1" != --all ]; then
  files=("$@")
else
  mapfile -t files < <(git ls-files 'src/*.cc' 'cli/*.cc' 'examples/*.cc')
  if [ $# -eq 0 ] && base=$(git merge-base HEAD origin/main 2>/dev/null); then
    mapfile -t changed < <(git diff --name-only --diff-filter=d "$base" -- "${files[@]}")
    [ ${#changed[@]} -eq 0 ] || files=("${changed[@]}")
  fi
fi
# The commands are g++'s: clang knows most of its warnings, not all, and finds libstdc++ 12's own use of deprecated parts.
printf '%s\0' "${files[@]}" | xargs -0 -P "$jobs" -n 4 "$tidy" -p build/ci --quiet \
  --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-deprecated-declarations || die "clang-tidy found something in the files above"
echo "check_tidy: ${#files[@]} files"

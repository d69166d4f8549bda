#!/usr/bin/env bash
# Checks that every C++ file is formatted as .clang-format says; --fix formats instead.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

# Version 14 is Debian 12's own; other versions format some lines differently.
clang_format=$(command -v clang-format-14) || die "clang-format-14 is missing: apt-get install clang-format-14"
mapfile -t files < <(git ls-files '*.cc' '*.h' '*.cpp' '*.cu' '*.cuh')
[ ${#files[@]} -gt 0 ] || die "git lists no C++ file here: run this in a clone"
if [ "${1:-}" = --fix ]; then
  "$clang_format" -i "${files[@]}"
else
  "$clang_format" --dry-run -Werror "${files[@]}" || die "run scripts/check_format.sh --fix"
fi
echo "check_format: ${#files[@]} files"

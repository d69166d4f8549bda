#!/usr/bin/env bash
# scripts/lib/packages.sh with stand-ins for dpkg-query, apt-get, sudo and id: what it installs, how, and what it says.
set -uo pipefail
project=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
failed=0

stub() { # stub <name> <body>
  printf '#!/bin/bash\n%s\n' "$2" >"$work/bin/$1"
  chmod +x "$work/bin/$1"
}

# run <uid> <with sudo?> <packages...>: ensure_packages in a world where only `present` is installed.
run() {
  local uid=$1 with_sudo=$2
  shift 2
  rm -rf "$work/bin" "$work/calls"
  mkdir -p "$work/bin"
  local tool
  for tool in bash dirname cat env nproc; do ln -s "$(command -v $tool)" "$work/bin/$tool"; done
  stub id "echo $uid"
  stub dpkg-query '[ "${!#}" = present ] && echo installed || exit 1'
  stub apt-get "echo \"apt-get \$*\" >>$work/calls; [ \"\${!#}\" != broken ]"
  [ "$with_sudo" = yes ] && stub sudo "echo \"sudo \$*\" >>$work/calls; exec \"\$@\""
  output=$(PATH=$work/bin bash -c 'source "$0/scripts/lib/common.sh"; source scripts/lib/packages.sh; ensure_packages "$@"' \
    "$project" "$@" 2>&1)
  status=$?
  calls=$(cat "$work/calls" 2>/dev/null)
}

expect() { # expect <what> <condition...>
  local what=$1
  shift
  if "$@"; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    printf 'FAILED: %s\n  status %s\n  output: %s\n  calls: %s\n' "$what" "$status" "$output" "$calls"
  fi
}
has() { [[ $1 == *"$2"* ]]; }

run 0 no present
expect "nothing missing: silent and no apt-get" test "$status$output$calls" = 0

run 0 no present absent
expect "root: succeeds" test "$status" = 0
expect "root: says what it installs" has "$output" "installing Debian packages: absent"
expect "root: installs only what is missing" has "$calls" "install -y -q --no-install-recommends absent"

run 1000 yes absent
expect "sudo: succeeds" test "$status" = 0
expect "sudo: says so" has "$output" "with sudo: absent"
expect "sudo: apt-get runs under sudo" has "$calls" "sudo apt-get update"

run 1000 no absent
expect "neither root nor sudo: fails" test "$status" = 1
expect "neither: names the command for an administrator" has "$output" "apt-get install absent"
expect "neither: nothing was run" test -z "$calls"

run 0 no broken
expect "apt-get fails: the script fails" test "$status" = 1
expect "apt-get fails: says which packages" has "$output" "could not install: broken"

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]

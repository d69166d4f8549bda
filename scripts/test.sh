#!/usr/bin/env bash
# Installs what is missing, builds everything with warnings as errors and runs all tests.
#   scripts/test.sh [options of ctest, e.g. -R experts]
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source scripts/lib/packages.sh

ensure_packages "${build_packages[@]}"
build ci
say "running the tests"
ctest --preset ci -j "$jobs" "$@" </dev/null

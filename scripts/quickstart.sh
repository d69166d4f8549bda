#!/usr/bin/env bash
# Installs what is missing, builds the command and lets the bundled model continue a prompt.
#   scripts/quickstart.sh ["PROMPT" [options of `cadre generate`...]]
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source scripts/lib/packages.sh

if [ $# -eq 0 ]; then
  set -- "The old captain looked at the sea and" --max-new-tokens 32
fi

ensure_packages "${build_packages[@]}"
build release cadre_cli
say "build/release/cli/cadre generate $(printf '%q ' "$@")"
build/release/cli/cadre generate "$@" </dev/null

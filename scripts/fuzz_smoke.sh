#!/usr/bin/env bash
# Builds the fuzz targets and runs each for some seconds (default 10): scripts/fuzz_smoke.sh [seconds]
# Ends with an error when one crashes, hangs or takes too much memory; the input is left in build/fuzz/found/<target>/.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-10}
if [[ ! $seconds =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: scripts/fuzz_smoke.sh [seconds per target, a whole number]" >&2
  exit 2
fi
build=${CADRE_FUZZ_BUILD:-build/fuzz}
targets=(safetensors checkpoint config template tokenizer image)
cmake --preset fuzz -B "$build" > /dev/null
ninja -C "$build" "${targets[@]/%/_fuzz}"
failed=()
for target in "${targets[@]}"; do
  found=$build/found/$target
  mkdir -p "$found" "$build/corpus/$target"
  echo "== $target, $seconds s"
  # New inputs go to the first folder, so the tree stays clean.
  if ! "$build/fuzz/${target}_fuzz" -max_total_time="$seconds" -max_len=65536 -timeout=10 -rss_limit_mb=2048 \
      -print_final_stats=1 -artifact_prefix="$found/" "$build/corpus/$target" "fuzz/corpus/$target" \
      > "$build/$target.log" 2>&1; then
    failed+=("$target")
    tail -n 40 "$build/$target.log"
  fi
  grep -E "number_of_executed_units|peak_rss" "$build/$target.log" || true
done
if ((${#failed[@]})); then
  echo "fuzz_smoke: failed: ${failed[*]}; the inputs are under $build/found" >&2
  exit 1
fi
echo "fuzz_smoke: all ${#targets[@]} targets ran $seconds s without a finding"

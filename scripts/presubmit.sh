#!/usr/bin/env bash
# Everything that a change must pass, in the order in which faults are cheapest to find.
#   scripts/presubmit.sh [--fast] [--only STAGE,...] [--skip STAGE,...]
# Stages: format layers headers tidy build test asan tsan fuzz. --fast leaves out asan, tsan and fuzz.
# All stages run even after a failure; the exit status is that of the worst.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source scripts/lib/packages.sh

stages=(format layers headers tidy build test asan tsan fuzz)
export UBSAN_OPTIONS=print_stacktrace=1

stage_format() { scripts/check_format.sh; }
stage_layers() { python3 scripts/check_layers.py; }
stage_headers() { build ci all_verify_interface_header_sets; }
stage_tidy() {
  ensure_packages "${tidy_packages[@]}"
  scripts/check_tidy.sh
}
stage_build() { build ci; }
stage_test() { ctest --preset ci -j "$jobs"; }
# Whole conformance on two instruction sets beside the default one; the kernels' own tests run on all of them.
stage_asan() {
  build asan-ubsan
  ctest --preset asan-ubsan -j "$jobs" -LE slow -E '^conformance_test\.isa\.(portable|avx512_bf16|amx)$'
}
# Threads meet in the pool, the backends and the model's forward; the rest is single-threaded. They meet alike on
# every instruction set, so one is enough.
stage_tsan() {
  build tsan core_test conformance_test
  without_aslr ctest --preset tsan -j "$jobs" -R '^(core_test|conformance_test)\.' -E '\.isa\.'
}
stage_fuzz() { scripts/fuzz_smoke.sh 10; }

# g++ 12's thread sanitizer cannot place its shadow memory under strong address randomisation.
without_aslr() {
  if setarch -R true 2>/dev/null; then
    setarch -R "$@"
  else
    "$@"
  fi
}

is_in() { [[ ",$2," == *",$1,"* ]]; }

only=$(IFS=,; echo "${stages[*]}")
skip=
while [ $# -gt 0 ]; do
  case $1 in
    --fast) skip=$skip,asan,tsan,fuzz ;;
    --only) only=${2:?--only needs stages} && shift ;;
    --skip) skip=$skip,${2:?--skip needs stages} && shift ;;
    *) die "unknown option $1: see the head of scripts/presubmit.sh" ;;
  esac
  shift
done
for name in ${only//,/ } ${skip//,/ }; do
  is_in "$name" "$(IFS=,; echo "${stages[*]}")" || die "unknown stage $name; there are: ${stages[*]}"
done

ensure_packages "${build_packages[@]}" "${check_packages[@]}"
report=
failed=0
for name in "${stages[@]}"; do
  is_in "$name" "$only" && ! is_in "$name" "$skip" || continue
  say "stage $name"
  start=$SECONDS
  # A subshell of its own: `set -e` holds inside, and the other stages run whatever it does.
  set +e
  (set -e; "stage_$name") </dev/null
  status=$?
  set -e
  [ $status -eq 0 ] && verdict=passed || { verdict="FAILED ($status)"; failed=1; }
  report+=$(printf '\n  %-8s %5d s  %s' "$name" $((SECONDS - start)) "$verdict")
done
[ -n "$report" ] || die "no stage left to run"
echo "presubmit:$report"
exit $failed

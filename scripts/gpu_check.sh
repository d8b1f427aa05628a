#!/usr/bin/env bash
# Run on a GPU all that a change to CUDA code must pass: cold builds, tests, compute-sanitizer. Stops at the first module
# that does not build, because rented minutes are short.
#
#   bash scripts/gpu_check.sh [RESULTS_DIR]               everything
#   FAMILIES="rope page" bash scripts/gpu_check.sh out    two families alone; folders and files of tests/ will do as well
#   STEPS="build memcheck" bash scripts/gpu_check.sh out  of: build test memcheck racecheck
#
# JOBS=8        processes at once, in all steps after the build; half of the cores unless given
# TEST_S=300    seconds that each of them may take: a file of tests, as it is or under a sanitizer
# CASES=        also what needs no GPU, which CI runs; or any other choice of pytest -k
# LIST=1        print the steps and paths that would run, one pair a line, and stop
# SANITIZE=1    how many tests the sanitizers see: about SANITIZE * sqrt(k) of k parametrisations; "all" is all, property
#               tests too, and takes many minutes
#
# Needs torch with CUDA, nvcc, pytest and apache-tvm-ffi on the path; installs nothing. compute-sanitizer if present.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
results=$(mkdir -p "${1:-gpu_check}" && cd "${1:-gpu_check}" && pwd)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-$(mktemp -d)}  # empty: builds are cold
steps=" ${STEPS:-build test memcheck racecheck} "
built=$(python3 -c "from flashinfer.aot import FAMILIES; print(*FAMILIES)") || exit 1
families=${FAMILIES:-}
# Folders without kernels of their own: tested as a whole, not under a sanitizer. `testing` and `benchmarks` come last, alone.
whole="cli cuda_compile docs dump jit packaging runtime trace utils"
if [ -z "$families" ]; then  # whatever is built or tested
  folders=$(cd tests && ls -d */ | tr -d / | grep -vxE "__pycache__|testing|benchmarks|$(echo $whole | tr ' ' '|')")
  families=$(printf '%s\n' attention $built $folders | awk '!seen[$0]++')  # what takes longest begins
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}  # several processes share the cores
export results limit=${TEST_S:-300} sample=${SANITIZE:-1} cases=${CASES-not cpu}

if [[ $steps == *" build "* && -z ${LIST:-} ]]; then
  python3 - "$results/build.json" $families <<'PYTHON' || exit 1
import json, sys, time
from flashinfer.aot import FAMILIES, gen_family_modules
from flashinfer.jit import build_jit_specs

out, *names = sys.argv[1:]
seconds = {}
for family in (name for name in names if name in FAMILIES):
    start = time.perf_counter()
    build_jit_specs(list(gen_family_modules(family)))
    seconds[family] = round(time.perf_counter() - start, 2)
    print("cold build", family, seconds[family], "s")
json.dump(seconds, open(out, "w"), indent=1)
PYTHON
fi

# check STEP PATH: one pytest, its output in RESULTS_DIR/STEP_NAME.txt, one line here.
check() {
  local step=$1 path=$2 log start=$SECONDS under=() chosen=(-k "$cases") code
  log=$results/${step}_$(echo "${path#tests/}" | tr / _).txt
  if [ "$step" != test ]; then
    # torch's own kernels go unchecked: they are most of the time and none of our business.
    under=(compute-sanitizer --tool "$step" --error-exitcode 9 --target-processes application-only
      --kernel-name kns=flashinfer)
    chosen=(-k "not cpu$(printf ' and not %s' compile graph one_launch bad error offset grid int32 2_31 millions names reference module)")
    [ "$sample" = all ] || chosen+=(--sample "$sample" -m "not hypothesis")
  fi
  timeout "$limit" "${under[@]}" python3 -m pytest -q -p no:cacheprovider "$path" "${chosen[@]}" > "$log" 2>&1
  code=$?
  echo "$step $path: exit $code ($((SECONDS - start)) s)" \
    "$(grep -hE "^(FAILED|ERROR)|(ERROR|RACECHECK) SUMMARY|(passed|failed|error).* in " "$log" | tail -n 8 | tr '\n' ' ')"
  [ $code -ne 255 ] || code=1      # at a 255 xargs stops
  [ $code -eq 5 ] || return $code  # 5: nothing to run; 9: the sanitizer found something; 124: out of time
}
export -f check

jobs=()
for family in $families; do
  path=tests/$family
  [ -e "$path" ] || path=tests/test_$family.py
  [ -e "$path" ] || { echo "$family: no tests of its own"; continue; }
  files=$(find "$path" -name 'test_*.py' -printf '%s %p\n' | sort -rn | cut -d' ' -f2)
  for step in test memcheck racecheck; do
    [[ $steps == *" $step "* ]] || continue
    [ "$step" = test ] || command -v compute-sanitizer > /dev/null || continue
    # Under racecheck torch's matrix products fail, whichever kernels it looks at.
    [[ $step == racecheck && $family =~ ^(serve|integrations)$ ]] && continue
    for file in $files; do jobs+=("$step" "$file"); done
  done
done
if [[ -z ${FAMILIES:-} && $steps == *" test "* ]]; then
  for path in $(printf 'tests/%s ' $whole) tests/test_*.py; do
    [[ " ${jobs[*]} " == *" $path "* ]] || jobs+=(test "$path")
  done
fi
if [ -n "${LIST:-}" ]; then
  printf '%s %s\n' "${jobs[@]}"
  [[ -n ${FAMILIES:-} || $steps != *" test "* ]] || printf "test %s\n" tests/testing tests/benchmarks
  exit 0
fi
status=0
printf '%s\n' "${jobs[@]}" | xargs -P "${JOBS:-$((($(nproc) + 1) / 2))}" -n 2 bash -c 'check "$@"' check || status=1
if [[ -z ${FAMILIES:-} && $steps == *" test "* ]]; then
  for path in tests/testing tests/benchmarks; do check test $path || status=1; done  # alone, for they measure time
fi
exit $status

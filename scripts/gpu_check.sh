#!/usr/bin/env bash
# What a change to CUDA code must pass on a GPU, in one go: cold builds, the tests of every family, compute-sanitizer,
# figures. Stops at the first module that does not build, because rented minutes are short.
#
#   bash scripts/gpu_check.sh [RESULTS_DIR]       TEST_S=300 SANITIZE_S=90 bound the steps, in seconds
#
# Needs torch with CUDA, nvcc, pytest and apache-tvm-ffi on the path; installs nothing. compute-sanitizer if present.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
results=$(mkdir -p "${1:-gpu_check}" && cd "${1:-gpu_check}" && pwd)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-$(mktemp -d)}  # empty: builds are cold
families=$(python3 -c "from flashinfer.aot import FAMILIES; print(*FAMILIES)") || exit 1

python3 - "$results/build.json" <<'PYTHON' || exit 1
import json, sys, time
from flashinfer.aot import FAMILIES, gen_family_modules
from flashinfer.jit import build_jit_specs

seconds = {}
for family in FAMILIES:
    start = time.perf_counter()
    build_jit_specs(list(gen_family_modules(family)))
    seconds[family] = round(time.perf_counter() - start, 2)
    print("cold build", family, seconds[family], "s")
json.dump(seconds, open(sys.argv[1], "w"), indent=1)
PYTHON

of_families=tests/test_scale.py
for family in $families; do [ -d "tests/$family" ] && of_families="$of_families tests/$family"; done
timeout "${TEST_S:-300}" python3 -m pytest -q -p no:cacheprovider tests/utils tests/testing tests/trace tests/test_tiny.py \
  $of_families > "$results/tests.txt" 2>&1
status=$?
echo "tests: exit $status"
tail -n 15 "$results/tests.txt"

for tool in memcheck racecheck; do
  command -v compute-sanitizer > /dev/null || break
  timeout "${SANITIZE_S:-90}" compute-sanitizer --tool $tool --error-exitcode 9 python3 -m pytest -q -x -p no:cacheprovider \
    $of_families -k "cuda and not compile and not graph and not property and not offset and not grid" > "$results/$tool.txt" 2>&1
  code=$?
  [ $code -eq 9 ] && status=9
  echo "$tool: exit $code (124: out of time, no error so far)"
  grep -E "ERROR SUMMARY|RACECHECK SUMMARY|passed|failed" "$results/$tool.txt" | tail -n 3
done
exit $status

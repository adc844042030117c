#!/usr/bin/env bash
# Every test that means something on a CUDA device: signals, windows, kernels, and real vLLM on them, on both model
# runners. Called by `make test-gpu`; the parts run side by side, and each is shown when all have ended.
set -uo pipefail
run=pytest
[ -x .venv/bin/pytest ] && run=.venv/bin/pytest
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ENABLE_V1_MULTIPROCESSING=0
options=(-m "gpu or vllm" -p no:cacheprovider "$@")
logs=$(mktemp -d)
trap 'tail -n +1 "$logs"/*; rm -rf "$logs"' EXIT
pids=()
part() { # part NAME TEST...: the tests of tests/runtime by their names
  local name=$1 paths=()
  shift
  for test in "$@"; do
    if [ -d "tests/$test" ]; then paths+=("tests/$test"); else paths+=("tests/runtime/test_$test.py"); fi
  done
  "$run" "${options[@]}" "${paths[@]}" >"$logs/$name" 2>&1 &
  pids+=($!)
}
part kernels features kernels device_policy device_graph
part graphs gpu_kernels
part gpus gpu_swaps tensor_parallel
first=(release slots slot_images fairness)
second=(probe policy identity shadow)
export VLLM_USE_V2_MODEL_RUNNER=0
part v1-first "${first[@]}"
part v1-second "${second[@]}"
unset VLLM_USE_V2_MODEL_RUNNER
export LORAZOR_TEST_RUNNER=v2-async
part v2-first "${first[@]}"
part v2-second "${second[@]}"
failed=0
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
exit $failed

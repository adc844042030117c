#!/usr/bin/env bash
# Every test that means something on a CUDA device: signals, windows, kernels, and real vLLM on them, on both model
# runners. Called by `make test-gpu`; the parts run side by side, and each is shown when all have ended or are stopped.
set -uo pipefail
run=pytest
[ -x .venv/bin/pytest ] && run=.venv/bin/pytest
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ENABLE_V1_MULTIPROCESSING=0
options=(-m "gpu or vllm" -p no:cacheprovider "$@")
logs=$(mktemp -d)
trap 'tail -n +1 "$logs"/*; rm -rf "$logs"' EXIT
pids=()
part() { # part NAME TESTS...
  "$run" "${options[@]}" "${@:2}" >"$logs/$1" 2>&1 &
  pids+=($!)
}
part kernels tests/features tests/kernels tests/runtime/test_{device_policy,device_graph}.py tests/training/test_attention.py
part graphs tests/runtime/test_gpu_kernels.py
part gpus tests/runtime/test_{gpu_swaps,tensor_parallel}.py
first=(tests/runtime/test_{release,slots,slot_images,fairness}.py)
second=(tests/runtime/test_{probe,policy,unprobed,identity,shadow}.py)
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

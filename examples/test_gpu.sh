#!/usr/bin/env bash
# Every test that means something on a CUDA device: signals, windows, kernels, and real vLLM on them, on both model
# runners. Called by `make test-gpu`; the three parts run side by side, and each is shown when all have ended.
set -uo pipefail
run=pytest
[ -x .venv/bin/pytest ] && run=.venv/bin/pytest
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ENABLE_V1_MULTIPROCESSING=0
options=(-m "gpu or vllm" -p no:cacheprovider "$@")
battery=(tests/runtime/test_{release,slots,slot_images,fairness,probe,policy,identity,shadow}.py)
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
"$run" "${options[@]}" tests/features tests/kernels \
  tests/runtime/test_{gpu_kernels,gpu_swaps,device_policy,device_graph,tensor_parallel}.py >"$logs/kernels" 2>&1 & parts=($!)
VLLM_USE_V2_MODEL_RUNNER=0 "$run" "${options[@]}" "${battery[@]}" >"$logs/v1" 2>&1 & parts+=($!)
LORAZOR_TEST_RUNNER=v2-async "$run" "${options[@]}" "${battery[@]}" >"$logs/v2" 2>&1 & parts+=($!)
failed=0
for part in "${parts[@]}"; do wait "$part" || failed=1; done
tail -n +1 "$logs"/*
exit $failed

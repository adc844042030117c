#!/usr/bin/env bash
# Every test that means something on a CUDA device: signals, windows, kernels, and real vLLM on them, on both model
# runners. Called by `make test-gpu`.
set -euo pipefail
run=pytest
[ -x .venv/bin/pytest ] && run=.venv/bin/pytest
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ENABLE_V1_MULTIPROCESSING=0
options=(-m "gpu or vllm" -p no:cacheprovider "$@")
battery=(tests/runtime/test_{release,slots,slot_images,fairness,probe,policy,identity,shadow}.py)
"$run" "${options[@]}" tests/features tests/kernels tests/runtime/test_{gpu_kernels,gpu_swaps,device_policy,tensor_parallel}.py
VLLM_USE_V2_MODEL_RUNNER=0 "$run" "${options[@]}" "${battery[@]}"
LORAZOR_TEST_RUNNER=v2-async "$run" "${options[@]}" "${battery[@]}"

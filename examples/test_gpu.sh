#!/usr/bin/env bash
# Every test that means something on a CUDA device: signals, windows, kernels, and real vLLM on them. Called by `make test-gpu`.
set -euo pipefail
run=pytest
[ -x .venv/bin/pytest ] && run=.venv/bin/pytest
export VLLM_USE_V2_MODEL_RUNNER=0 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ENABLE_V1_MULTIPROCESSING=0
exec "$run" -m "gpu or vllm" -p no:cacheprovider tests/features tests/kernels tests/runtime/test_{release,slots,probe,policy,identity,gpu_kernels,device_policy}.py "$@"

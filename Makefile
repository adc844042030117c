# make demo   the whole loop on a real model: train, tune, serve, compare      (first run installs into .venv)
# make test   lint, types and every test that needs no GPU                     (first run installs into .venv)
PYTHON ?= python3.11
PIP_FLAGS ?=
PACKAGES := features kernels policy runtime training
BIN := .venv/bin
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
# What must hold on either model runner of vLLM: the second run is on V2, interpreted (tests/runtime/v2_on_cpu.py).
BATTERY := $(addprefix tests/runtime/test_,release.py slots.py slot_images.py probe.py policy.py unprobed.py identity.py shadow.py fairness.py soak.py)
ENGINE := $(if $(HAS_GPU),gpu,cpu)

.PHONY: install demo test test-gpu soak check links format clean

install: .venv/ready

.venv/ready: pyproject.toml constraints-cpu.txt examples/install.sh
	@PYTHON=$(PYTHON) PIP_FLAGS="$(PIP_FLAGS)" bash examples/install.sh $(ENGINE)
	@touch $@

demo: install
	$(BIN)/python examples/demo.py

test: install check
	$(BIN)/pytest -m "not gpu"
	LORAZOR_TEST_RUNNER=v2-async $(BIN)/pytest $(BATTERY)

# On a machine with an NVIDIA GPU and vLLM; uses .venv if it is there, else the python on PATH.
test-gpu:
	bash examples/test_gpu.sh

# Random traffic whose every text is checked, for SECONDS; RUNNER=v2-async: on model runner V2.
SECONDS ?= 3600
soak: install
	LORAZOR_SOAK_SECONDS=$(SECONDS) LORAZOR_TEST_RUNNER=$(RUNNER) $(BIN)/pytest -s tests/runtime/test_soak.py

check: install links
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# mypy reads the packages under the names that users import.
links:
	@mkdir -p .types/lorazor
	@$(foreach p,$(PACKAGES),ln -sfn ../../$(p) .types/lorazor/$(p);)

clean:
	rm -rf .venv .types build demo .models

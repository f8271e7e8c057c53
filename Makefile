# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where torch comes from. Empty: pip's own choice. See README, "torch".
TORCH_INDEX ?=
STAMP := $(VENV)/.pearl-setup

.PHONY: setup demo test check fmt clean soak

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

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -n auto tests/unit tests/paper tests/contract tests/sim tests/tidy -m "not slow"

# Ten minutes of faults on real processes, three hosts and three NATS servers: docs/chaos.md.
SEED ?= 0
soak: setup
	$(BIN)/python -m tests.integration.chaos --minutes 10 --seed $(SEED) --report chaos-report.json

clean:
	rm -rf $(VENV) .pearl build *.egg-info

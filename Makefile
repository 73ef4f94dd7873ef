# Two commands matter: `make run` (the demo) and `make test`. Both make the environment when it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := train,deepspeed,qlora,dev
JOBS ?= 2
# One ninja for everything that compiles: with two of them DeepSpeed builds its operators anew each time.
export PATH := $(abspath $(BIN)):$(PATH)
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

.PHONY: run app env lint test test-all bench accuracy gpu-check warm clean

run: env
	$(BIN)/ftdash demo

app: env
	$(BIN)/ftdash

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "ftdash needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "$(PYTHON) has no venv module (Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "Making the environment in $(VENV), once: PyTorch and the training stack, a few minutes"
	@$(PYTHON) -m venv $(VENV)
	@# torch first and by version: everything after it then keeps that build
	@echo "  1 of 2: $$(grep '^torch==' constraints.txt)"
	@$(BIN)/pip install -q --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@echo "  2 of 2: ftdash with $(EXTRAS)"
	@# setuptools warns of editable installs at length: the folders stand where it fears them on purpose
	@PYTHONWARNINGS=ignore $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@$(BIN)/python -m compileall -q tui engine monitor
	@touch $(STAMP)

lint: env
	$(BIN)/ruff check tui engine monitor presets tests
	$(BIN)/ruff format --check tui engine monitor presets tests
	@mkdir -p .mypy && ln -sfn .. .mypy/ftdash
	MYPYPATH=.mypy $(BIN)/mypy -p ftdash.tui -p ftdash.engine -p ftdash.monitor -p ftdash.presets

test: env lint
	$(PYTEST) -m 'not slow and not slurm'

test-all: env lint warm
	$(PYTEST)

bench: env
	$(BIN)/python -m tests.bench

accuracy: env
	$(BIN)/python -m tests.accuracy

# On a machine with an NVIDIA GPU; GPU_CHECK=--cpu proves without one that it runs
gpu-check: env
	$(BIN)/python -m tests.gpu $(GPU_CHECK)

# DeepSpeed compiles its CPU operators on first use, about a minute each: once, before anything is timed out by it
warm: env
	$(BIN)/python -m tests.support.warm

clean:
	rm -rf $(VENV) .mypy .ruff_cache .mypy_cache build dist *.egg-info

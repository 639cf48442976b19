# Two commands do everything, set-up included: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
# The CPU build of torch; with a GPU, install torch yourself and `pip install -e ".[gpu]"`.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# libgomp spins while it waits, which makes every small operation slow on few cores.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-train check fix test test-gpu bench clean

help: ## Show the commands.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.dev ## Install the package with all that tests need into .venv.

demo: $(VENV)/.demo ## Recommend films from MovieLens-100K with a trained model, and compare.
	@$(BIN)/python -m examples.movielens.demo

demo-train: $(VENV)/.demo ## Train the demo's model again, from the data up.
	@$(BIN)/python -m examples.movielens.train

check: $(VENV)/.dev ## Format check, lint and types; changes nothing.
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

fix: $(VENV)/.dev ## Format, and mend what lint can mend.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

test: check $(VENV)/.demo ## All checks and all tests that need no GPU.
	@$(BIN)/python -m pytest

test-gpu: ## Tests that need a GPU, with GPU_PYTHON (default python3).
	@$(GPU_CHECK)
	@PYTHONPATH=. $(GPU_PYTHON) -m pytest -m gpu -p no:benchmark $(GPU_TESTS)

bench: ## Measure on a GPU, all or BENCHES; lines go to bench/results.
	@$(GPU_CHECK)
	@PYTHONPATH=. $(GPU_PYTHON) -m bench.run_all $(BENCHES)

clean: ## Remove the environment and everything built.
	rm -rf $(VENV) build onela.egg-info

GPU_PYTHON ?= python3
GPU_TESTS ?= tests/ops tests/engine tests/models tests/items
# Scripts of bench/ by name; empty: all that measure on a GPU.
BENCHES ?=
GPU_CHECK = $(GPU_PYTHON) -c "import importlib.util as util, sys; \
	util.find_spec('torch') or sys.exit('make $@: $(GPU_PYTHON) has no torch; GPU_PYTHON=... names a Python that has'); \
	import torch; sys.exit(0 if torch.cuda.is_available() else 'make $@ needs an NVIDIA GPU, and torch sees none here')"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(PIP) "$(TORCH)" -e ".[dev]"
	@touch $@

# recbole carries MovieLens-100K; only its data are used, so none of its dependencies.
$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(PIP) "$(TORCH)" -e ".[demo,serve]"
	$(PIP) --no-deps recbole==1.2.1
	@touch $@

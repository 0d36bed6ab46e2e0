# make serve   sets everything up and serves the demo model on http://127.0.0.1:8000
# make test    sets everything up and runs the whole test suite
#
# Needs python3 (3.11 or newer), pip, make and git: no root, no GPU, no account.
#
# Variables, on the command line or in the environment:
#   PYTHON            interpreter the environment is made with      (python3)
#   TORCH_INDEX_URL   package index to take torch from              (pip's own)
#                     e.g. https://download.pytorch.org/whl/cpu for the small CPU build
#   SNAPKV_CACHE_DIR  where the demo model and test texts are kept  (~/.cache/snapkv)
#   PYTEST_ARGS       further arguments for pytest                  (none)
#   TEST_WORKERS      processes that share the tests                (2)

PYTHON ?= python3
TORCH_INDEX_URL ?=
PYTEST_ARGS ?=
TEST_WORKERS ?= 2
SNAPKV_CACHE_DIR ?= $(HOME)/.cache/snapkv

# Waiting threads sleep instead of spinning: docs/adr/0008.
export OMP_WAIT_POLICY ?= PASSIVE

VENV := .venv
BIN := $(VENV)/bin
# Without byte-compiling every file up front, which halves the time: Python does it for what it imports.
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile \
    --constraint constraints.txt
# A file's tests stay together, since they share servers and models. Files go in their order: by
# default those with the fewest tests come last, and the longest test of all is alone in its file.
PYTEST := $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
CODE := $(wildcard app snapkv_core tests scripts benchmarks examples)

# Stamps: what they name is done until what they depend on changes. The cache folder holds its own,
# so that deleting the cache deletes them.
INSTALLED := $(VENV)/.installed
DEMO_READY := $(SNAPKV_CACHE_DIR)/.make-demo-model
ESSAYS_READY := $(SNAPKV_CACHE_DIR)/.make-essays

.DEFAULT_GOAL := help
.NOTPARALLEL: # pip and the model conversion are not made for two at once; -j is accepted and ignored
.DELETE_ON_ERROR:
.PHONY: help setup serve test check lint format bench soak overhead http-cost snapshots lock clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "%-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) $(DEMO_READY) $(ESSAYS_READY) ## Environment, dependencies, demo model, test texts

serve: $(INSTALLED) $(DEMO_READY) ## Serve on 127.0.0.1:8000 (SNAPKV_HOST, SNAPKV_PORT, SNAPKV_MODEL, ...)
	@exec $(BIN)/snapkv serve

test: $(INSTALLED) $(DEMO_READY) $(ESSAYS_READY) ## Run the whole test suite (GPU tests apart)
	$(PYTEST) -m "not gpu" $(PYTEST_ARGS)

check: lint $(DEMO_READY) ## Formatting, lint, import contracts, types, fast tests
	$(PYTEST) -m "not gpu and not slow" $(PYTEST_ARGS)

lint: $(INSTALLED) ## The part of check that runs no tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy $(CODE)

format: $(INSTALLED) ## Format the code and apply safe fixes
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(INSTALLED) $(DEMO_READY) ## Measure engine and server on this machine (BENCH_ARGS, docs/benchmarks.md)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

soak: $(INSTALLED) $(DEMO_READY) ## Load the server for a long time, watch memory and leaks (SOAK_ARGS)
	$(BIN)/python -m benchmarks.soak $(SOAK_ARGS)

overhead: $(INSTALLED) $(DEMO_READY) ## Measure what telemetry costs of a decode step (OVERHEAD_ARGS)
	$(BIN)/python -m benchmarks.telemetry $(OVERHEAD_ARGS)

http-cost: $(INSTALLED) ## Measure the processor time of HTTP itself (HTTP_COST_ARGS)
	$(BIN)/python -m benchmarks.http_cost $(HTTP_COST_ARGS)

snapshots: $(INSTALLED) $(DEMO_READY) ## Measure snapshots: hits, a store that goes away, 8 bits (SNAPSHOTS_ARGS)
	$(BIN)/python -m benchmarks.snapshots $(SNAPSHOTS_ARGS)

lock: $(INSTALLED) ## Write the versions installed in .venv to constraints.txt
	$(BIN)/python scripts/lock.py

clean: ## Remove the environment, caches and build output (not the model cache)
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Where the system's Python comes without ensurepip, pip itself fills an environment made without it.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	    $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --quiet --python $(VENV)/bin/python install pip; } || { \
	    rm -rf $(VENV); exit 1; }

# torch goes first and alone when it has an index of its own, so that nothing else comes from there.
# The build backend goes before the project, so that building it needs no versions but the pinned.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing dependencies into $(VENV) (a few minutes the first time) ..."
	$(if $(strip $(TORCH_INDEX_URL)),@$(PIP_INSTALL) --no-deps --index-url $(TORCH_INDEX_URL) torch,@:)
	@$(PIP_INSTALL) hatchling editables
	@$(PIP_INSTALL) --no-build-isolation --editable ".[dev]"
	@touch $@

$(DEMO_READY): snapkv_core/models/demo.py | $(INSTALLED)
	@mkdir -p "$(SNAPKV_CACHE_DIR)"
	@SNAPKV_CACHE_DIR="$(SNAPKV_CACHE_DIR)" $(BIN)/snapkv demo-model
	@touch "$@"

$(ESSAYS_READY): tests/support/essays.py | $(INSTALLED)
	@mkdir -p "$(SNAPKV_CACHE_DIR)"
	@SNAPKV_CACHE_DIR="$(SNAPKV_CACHE_DIR)" $(BIN)/python -m tests.support.essays
	@touch "$@"

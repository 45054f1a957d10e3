# stratagate: `make serve`, `make test`, `make check`. Each sets up what it needs in a virtual environment first.
#
#   make serve ARGS="--port 9000"     options are passed on to `stratagate serve`
#   make serve ACCEL=cuda             torch with CUDA, in an environment of its own (.venv-cuda)
#   make test ARGS="-k sampling -x"   options are passed on to pytest
#   make ... PYTHON=python3.12        another interpreter

PYTHON ?= python3
ACCEL ?= cpu
ARGS ?=

TORCH_VERSION := 2.13.0
# Where PyTorch publishes CPU builds; asked only when pip's own indexes have none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# On Linux a plain `torch` is a CUDA build of several gigabytes. The local version +cpu can only be a CPU build.
# `===` compares the whole string, so an index that also offers +cpu cannot answer a wish for CUDA with it.
ifeq ($(ACCEL),cuda)
VENV ?= .venv-cuda
TORCH ?= torch===$(TORCH_VERSION)
MINUTES := 3 to 10 minutes (about 3 GB to download)
else ifeq ($(ACCEL),cpu)
VENV ?= .venv
MINUTES := 1 to 3 minutes (about 300 MB to download)
ifeq ($(shell uname -s),Linux)
TORCH ?= torch==$(TORCH_VERSION)+cpu
else
TORCH ?= torch==$(TORCH_VERSION)
endif
else
$(error ACCEL=$(ACCEL): must be cpu or cuda)
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
LOCKED := $(PIP) --constraint requirements.lock
# The project is installed with the build tools of the lock file instead of whatever is newest that day.
PROJECT := $(LOCKED) --no-build-isolation --editable
# The CPU step is compiled by the machine's C compiler, or by one from the package index.
NEEDS_ZIG := $(if $(shell command -v cc gcc clang 2>/dev/null),,ziglang)

.PHONY: help serve test browser-test check format lock clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# A library that was removed, or belongs to other sources, is compiled again.
serve: $(VENV)/.serve ## start the server with the default model: http://127.0.0.1:8080/
	@$(BIN)/python -m engine.native.build || true
	$(BIN)/stratagate serve $(ARGS)

# One process a core, whole files each: the models that a file's tests share are built once.
test: $(VENV)/.dev ## run the tests; needs no GPU
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile $(ARGS)

browser-test: $(VENV)/.dev ## run the tests of the page; needs an installed Chromium
	$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

check: $(VENV)/.dev ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev ## let ruff format and fix what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch stays out of the lock file, since which build is right depends on the machine; what it needs is in it.
# setuptools: torch 2.11 and 2.12 need one below 82, and the lock file should serve all supported releases.
lock: $(VENV)/.python ## write requirements.lock anew with the newest versions allowed by pyproject.toml
	$(PIP) uv
	@printf '%s\n' filelock fsspec networkx sympy 'setuptools<82' typing-extensions > $(VENV)/lock.in
	@echo "torch ; python_version < '3'" > $(VENV)/lock-override.in
	@{ echo '# Exact versions for Python 3.11 and later, used as pip constraints. Written by `make lock`.'; \
	   $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade --no-header --no-annotate \
	     --override $(VENV)/lock-override.in --extra dev --extra loadtest pyproject.toml $(VENV)/lock.in; \
	} > $(VENV)/lock.out && mv $(VENV)/lock.out requirements.lock

clean: ## remove the environments and everything built
	rm -f engine/native/*.so
	rm -rf .venv .venv-cuda build dist .pytest_cache .ruff_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# Stamps: a finished step leaves a file, and is done again when what it was made from is newer.

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "stratagate needs Python 3.11 or later, but $(PYTHON) is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.python requirements.lock
	@echo "Setting up $(VENV) with $(TORCH): takes $(MINUTES), once."
	@start=$$(date +%s); \
	$(LOCKED) '$(TORCH)' 2> $(VENV)/torch.log \
	  || $(LOCKED) --extra-index-url $(TORCH_INDEX) '$(TORCH)' \
	  || { cat $(VENV)/torch.log >&2; \
	       echo "No index has $(TORCH) for this Python. Name another build or index: make ... TORCH=torch==VERSION TORCH_INDEX=URL" >&2; \
	       exit 1; }; \
	rm -f $(VENV)/torch.log; \
	echo "torch: $$(( $$(date +%s) - start )) s"
	@touch $@

$(VENV)/.serve: $(VENV)/.torch pyproject.toml requirements.lock $(wildcard engine/native/src/*)
	@start=$$(date +%s); \
	$(LOCKED) hatchling editables $(NEEDS_ZIG) && $(PROJECT) . && \
	echo "server: $$(( $$(date +%s) - start )) s"
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@start=$$(date +%s); \
	$(PROJECT) '.[dev,loadtest]' && \
	echo "tools for tests and checks: $$(( $$(date +%s) - start )) s"
	@touch $@

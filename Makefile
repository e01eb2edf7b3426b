# Vernal. `make demo` trains a real model, `make test` checks everything, `make bench` measures.
# Needs Python 3.11 or newer with venv and pip; another Python: `make test PYTHON=python3.13`.

PYTHON ?= python3
export NPROC ?= 4
export JAX_PLATFORMS = cpu
export PYTHONWARNINGS =
# The tests start hundreds of processes: they read what Python has compiled, also where it is told to keep nothing.
export PYTHONDONTWRITEBYTECODE =

TAG := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(TAG),)
$(error "$(PYTHON)" does not run; name a Python 3.11 or newer: make PYTHON=python3.13)
endif

# A second interpreter gets a directory of its own, so that the everyday one survives.
ifeq ($(PYTHON),python3)
VENV ?= .venv
else
VENV ?= .venv-$(TAG)
endif

# JAX 0.10.2 is the newest JAX that supports Python 3.11; everything newer needs Python 3.12.
# Hence two sets of versions, and between them both ends of what we support are tested.
ifeq ($(TAG),3.11)
CONSTRAINTS := constraints.txt
else
CONSTRAINTS := constraints-newest.txt
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Two workers, each with one thread for LAPACK: with more they wait for each other, up to four times as long.
PYTEST := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
# A whole file goes to one worker: the programs compiled for it are shared and then dropped together.
# The longest files begin (tests/conftest.py), so that no worker waits for another one at the end.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
# What has a pass of its own.
APART := --ignore tests/typing --ignore tests/test_readme.py --ignore tests/stack

.PHONY: help demo test lint types test-types test-fast doctest test-docs test-stack test-peers test-slow peers browser docs docs-serve bench accelerator format constraints clean
.DEFAULT_GOAL := help

help:
	@echo "make demo         train, save and inspect a model on real data"
	@echo "make test         every check: style, types, tests, doctests, README and docs"
	@echo "make docs         the site, into site/"
	@echo "make docs-serve   the site on http://localhost:8000, built again when a page changes"
	@echo "make bench        the benchmark tables"
	@echo "make accelerator  answers and speed on the GPU or TPU that JAX finds, as one Markdown report"
	@echo "make peers        the test suites of libraries built on Equinox, on Equinox and on Vernal"
	@echo "make format       rewrite the sources in the house style"
	@echo "make constraints  refresh $(CONSTRAINTS) with the newest versions this Python can have"
	@echo "make clean        remove environments and caches"

# Installing happens again only when what is to be installed has changed.
$(BIN)/python:
	@echo "== making $(VENV) with Python $(TAG)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.examples-installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "== installing what the examples need ($(CONSTRAINTS))"
	@$(PIP) install --constraint $(CONSTRAINTS) --editable '.[examples]'
	@touch $@

$(VENV)/.dev-installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "== installing the development tools ($(CONSTRAINTS))"
	@$(PIP) install --constraint $(CONSTRAINTS) --editable '.[examples,dev]'
	@touch $@ $(VENV)/.examples-installed

demo: $(VENV)/.examples-installed
	@$(BIN)/python examples/digits.py

# One after the other, cheapest first, whatever -j says: each uses both cores itself, but for those with a -j2.
test: $(VENV)/.dev-installed
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory -j2 --output-sync test-docs types test-types docs
	@$(MAKE) --no-print-directory test-fast
	@$(MAKE) --no-print-directory doctest
	@$(MAKE) --no-print-directory test-stack
	@$(MAKE) --no-print-directory test-peers
	@$(MAKE) --no-print-directory test-slow

lint: $(VENV)/.dev-installed
	@echo "== style: ruff"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(VENV)/.dev-installed
	@echo "== types of the package: basedpyright"
	@$(BIN)/basedpyright --pythonpath $(BIN)/python

test-types: $(VENV)/.dev-installed
	@echo "== types that users see: basedpyright and mypy --strict on tests/typing/cases"
	@$(PYTEST) tests/typing

test-fast: $(VENV)/.dev-installed
	@echo "== tests"
	@$(PYTEST) $(PARALLEL) -m 'not slow' $(APART) tests

doctest: $(VENV)/.dev-installed
	@echo "== examples in docstrings"
	@$(PYTEST) $(PARALLEL) -p tests.conftest --doctest-modules --ignore src/vernal/compat/pytest.py src/vernal

test-docs: $(VENV)/.dev-installed
	@echo "== examples in README.md and docs/"
	@$(PYTEST) tests/test_readme.py

test-slow: $(VENV)/.dev-installed browser
	@echo "== slow tests"
	@$(PYTEST) $(PARALLEL) -m slow $(APART) tests

# In processes of their own: there, Vernal answers to `import equinox`.
test-stack: $(VENV)/.dev-installed
	@echo "== libraries built on Equinox, on Vernal"
	@$(PYTEST) $(PARALLEL) tests/stack

# Downloads the sources of these libraries, which carry their tests.
test-peers: $(VENV)/.dev-installed
	@echo "== a part of the test suites of libraries built on Equinox, on Vernal"
	@OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.peers --slice

peers: $(VENV)/.dev-installed
	@OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.peers

# The report of compilations is tested in a browser: Debian's Chromium, without a window.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
		echo "== installing Chromium"; \
		if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
			echo "the slow tests need Chromium: install it first (apt-get install chromium)" >&2; exit 1; \
		fi; \
		apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium >/dev/null; }

# Warnings are errors: a link or an anchor that leads nowhere, a docstring that cannot be read.
docs docs-serve: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.dev-installed
	@echo "== the site, into site/"
	@$(BIN)/python -m mkdocs build --quiet

docs-serve: $(VENV)/.dev-installed
	@$(BIN)/python -m mkdocs serve

bench: $(VENV)/.dev-installed
	@status=0; for script in $(filter-out benchmarks/accelerator.py,$(wildcard benchmarks/[a-z]*.py)); do \
		echo "== $$script"; $(BIN)/python $$script || status=1; done; exit $$status

# In the given Python itself, whose JAX was installed for the accelerator.
accelerator:
	@env -u JAX_PLATFORMS PYTHONPATH=src $(PYTHON) benchmarks/accelerator.py --out accelerator.md

format: $(VENV)/.dev-installed
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

constraints:
	@echo "== resolving $(CONSTRAINTS) with Python $(TAG)"
	@rm -rf $(VENV)-resolve
	@$(PYTHON) -m venv $(VENV)-resolve
	@$(VENV)-resolve/bin/python -m pip --quiet --disable-pip-version-check install --editable '.[examples,dev]'
	@$(VENV)-resolve/bin/python -m pip --disable-pip-version-check freeze --exclude-editable | sed 's/+cpu$$//' > $(CONSTRAINTS)
	@rm -rf $(VENV)-resolve

clean:
	rm -rf .venv .venv-* site .pytest_cache .ruff_cache .mypy_cache .hypothesis runs
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

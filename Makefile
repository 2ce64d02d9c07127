# `make demo` shows mstar, `make test` checks it. Both set up .venv themselves, once.
#
#   TORCH   what pip installs as torch. The default takes a CPU build where pip is offered one. With a torch of
#           your own: TORCH='torch --index-url https://download.pytorch.org/whl/cu130', or TORCH= (empty) to
#           use the one that PYTHON has.
#   PYTHON  the interpreter of the virtual environment, 3.11 or later.

TORCH ?= torch==2.13.0
PYTHON ?= python3

BIN := .venv/bin
READY := .venv/.ready
FOLDERS := daemon ranks loader arch kernels scripts
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install --no-compile

.PHONY: demo test lint aot bench setup clean

demo: setup
	@$(BIN)/python -m mstar.scripts.demo

test: lint
	@$(BIN)/python -m pytest -n 2 --dist loadfile

lint: setup
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "run: $(BIN)/ruff format ."; exit 1; }
	@MYPYPATH=.typecheck $(BIN)/mypy --strict --no-error-summary -p mstar

# Compiled, not run: needs no GPU. `make test` does sm_90 and gfx942.
aot: setup
	@$(BIN)/python -m mstar.kernels.aot

bench: setup
	@$(BIN)/python -m mstar.scripts.bench_serving

setup: $(READY)

# torch first and by itself: what needs it takes the build that is there.
$(READY): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mstar needs Python 3.11 or later: make PYTHON=python3.11 ...")'
	@echo "setting up .venv (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(if $(TORCH),,--system-site-packages) .venv
	@$(if $(TORCH),$(PIP) $(TORCH),$(BIN)/python -c 'import torch')
	@$(PIP) -e '.[test]'
	@mkdir -p .typecheck/mstar
	@for folder in $(FOLDERS); do ln -sfn ../../$$folder .typecheck/mstar/$$folder; done
	@touch $@

clean:
	@rm -rf .venv .typecheck .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	@find $(FOLDERS) tests -name __pycache__ -type d -prune -exec rm -rf {} +

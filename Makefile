# Everything here sets up its own .venv first; python3 and make are all a machine needs.
#
#   make demo    the chapter's config on 8 local ranks: trains, then compares predicted with measured
#   make test    the tests
#   make lint    ruff and mypy
#   make setup   only the set-up
#   make clean   removes what the other targets wrote, except .venv (make distclean: that too)
#
# PYTHON=python3.12       the interpreter to build .venv from (3.10 or later)
# PIP_ARGS="..."          more arguments for pip, e.g. an index with the torch build for an older CUDA driver
# PYTEST_ARGS="..."       instead of "-n 2" (two test processes)
# DEMO="..."              what `hybridlab train` is given

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?= -n 2
DEMO ?= labs/chapter/ds_config.json --model llama-13b-mini --ranks 8 --steps 25 --out out/demo

VENV := .venv
# Run as modules: the scripts in .venv/bin hold its absolute path and break when the folder is moved.
RUN := $(VENV)/bin/python -m
READY := $(VENV)/.ready
LOG := $(VENV)/setup.log

.PHONY: help demo test lint setup clean distclean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(READY)
	@$(RUN) hybridlab train $(DEMO)

# One thread an operator: several ranks share the cores.
test: export OMP_NUM_THREADS = 1
test: $(READY)
	@$(RUN) pytest $(PYTEST_ARGS)

lint: $(READY)
	@$(RUN) ruff check
	@$(RUN) ruff format --check
	@$(RUN) mypy

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo "$(PYTHON) is not installed. Fix: install Python 3.10 or later, or say PYTHON=/path/to/python." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$$("$(PYTHON)" --version 2>&1) is too old: 3.10 or later is needed. Fix: say PYTHON=python3.x." >&2; exit 1; }
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module. Fix: install it (Debian, Ubuntu: apt install python3-venv)." >&2; exit 1; }
	@echo "Setting up $(VENV): once, some minutes (most of it is torch)."
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	@$(RUN) pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]' >$(LOG) 2>&1 || \
	  { cat $(LOG); echo "Set-up failed; pip's words are above." >&2; exit 1; }
	@touch $@

clean:
	rm -rf out build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

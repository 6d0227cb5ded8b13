# Every target but clean sets up .venv first; see README.md.
#   make sweep [ARGS=...]  a sweep of PPO on the tiny model; ARGS go to experiments/ppo_sweep.py
#   make test              ruff, mypy and the tests that take seconds or a few minutes
#   make test-all          the tests that kill things, too
#   make measure           the measures of the source and their limits; ARGS=--list names the places
#   make bench             the benchmarks
SHELL := bash
PYTHON ?= $(shell command -v python3.11 || echo python3)
ACCELERATOR ?= cpu
BIN := .venv/bin
# Where PIP_FIND_LINKS names a folder of wheels, torch's CPU build comes from there; elsewhere from PyTorch's own index.
TORCH := $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--torch-backend $(if $(filter cuda,$(ACCELERATOR)),auto,cpu))
PINNED := $(if $(filter cpu,$(ACCELERATOR)),--constraint constraints.txt)
# Without cached bytecode every one of the dozen processes of a run compiles its imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: sweep test test-all lint measure bench clean

sweep: .venv/ready-$(ACCELERATOR)
	$(BIN)/python experiments/ppo_sweep.py $(ARGS)

test: lint
	$(BIN)/python -m pytest -n 2 $(ARGS)

test-all: lint
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

lint: .venv/ready-$(ACCELERATOR)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

measure: .venv/ready-$(ACCELERATOR)
	$(BIN)/python tests/house_measures.py $(ARGS)

bench: .venv/ready-$(ACCELERATOR)
	$(BIN)/python bench/update.py $(ARGS)
	$(BIN)/python bench/step.py --bare $(ARGS)
	$(BIN)/python bench/scaling.py $(ARGS)
	$(BIN)/python bench/sync.py
	$(BIN)/python bench/checkpoint.py
	$(BIN)/python bench/sweep.py

.venv/ready-$(ACCELERATOR): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/uv pip install --quiet $(TORCH) $(PINNED) --editable '.[$(ACCELERATOR),dev]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache

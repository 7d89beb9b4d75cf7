# Radixfleet: `make demo` runs the main job on a laptop, `make test` passes the tests. Both set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak lint types imports proto check clean

help: ## List the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make .venv and install Radixfleet in it, with the versions it is tested with

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Radixfleet needs Python 3.11 or newer; {sys.executable} is {v.major}.{v.minor}. Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@echo "setup: making $(VENV) (about 2.5 GB with torch and Ray; a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@echo "setup: installing torch, then the rest"
	@$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt torch
	@$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)
	@echo "setup: done; the command is $(BIN)/radixfleet"

demo: setup ## Start a router and two workers, chat with them, show what the cache did, stop
	@$(BIN)/radixfleet demo

# Three processes, also on two cores: much of the suite waits. A file stays on one of them, because its tests share a fleet, a
# model or a cluster. Files keep their order (tests/conftest.py has the longest first): sorted by their number of tests, the
# longest of single tests would come last, and the other processes idle.
TEST_PROCESSES ?= 3
test: setup ## Run the tests
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

SOAK_MINUTES ?= 10
soak: setup ## Load a fleet for SOAK_MINUTES (10) while its processes are killed; pools must end empty, memory flat
	@$(BIN)/python -m tests.soak.soak --minutes $(SOAK_MINUTES)

lint: setup ## Check style
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup ## Check types
	@$(BIN)/mypy

imports: setup ## Check who imports whom
	@$(BIN)/lint-imports

check: test lint types imports ## All that CI runs

proto: setup ## Generate the gRPC code from proto/radixfleet/v1/*.proto
	@$(BIN)/python proto/generate.py

clean: ## Remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

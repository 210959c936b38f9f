# Two commands matter: `make up` and `make test`. Both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
UP_ARGS ?=

.PHONY: up test unit fuzz lint format bench clean

up: $(STAMP)
	$(BIN)/kv-router up $(UP_ARGS)

test: $(STAMP)
	$(BIN)/pytest -q

unit: $(STAMP)
	$(BIN)/pytest -q -m "not integration"

# Longer random sequences against the index's definition; FUZZ_SEQUENCES=10000 runs for hours.
FUZZ_SEQUENCES ?= 2000
fuzz: $(STAMP)
	KV_FUZZ_EXAMPLES=$(FUZZ_SEQUENCES) $(BIN)/pytest -q tests/router/indexer/test_radix_tree_machine.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile
	$(BIN)/yamllint --strict deploy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/placement.py
	$(BIN)/python benchmarks/index.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[agent,dev]"
	$(BIN)/python -m router.warm
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

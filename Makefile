# Each target sets up what it needs: a fresh clone can start with any of them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: install humanoid test bench docs lint clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/developer: $(VENV)/installed
	$(PIP) -e '.[test,dev]'
	touch $@

$(VENV)/peers: $(VENV)/installed
	$(PIP) torch==2.13.0
	$(PIP) -e '.[bench]'
	touch $@

$(VENV)/writer: $(VENV)/installed
	$(PIP) -e '.[docs]'
	touch $@

humanoid: install
	$(BIN)/python experiments/humanoid.py

test: $(VENV)/developer
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/developer
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/peers
	$(BIN)/python benchmarks/run.py --quick

docs: $(VENV)/writer
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

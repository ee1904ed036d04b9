# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SERVE := $(VENV)/.installed-serve
DEV := $(VENV)/.installed-dev
# Files in the order of their names. By their number of tests, as xdist has it, files of one long test would come last,
# and one process would wait for the other.
PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-full lint bench bench-serve figures clean

$(SERVE): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[serve]"
	touch $(SERVE)

$(DEV): $(SERVE)
	$(PIP) -e ".[dev]"
	touch $(DEV)

demo: $(SERVE)
	$(BIN)/kvforge demo

test: $(DEV)
	$(BIN)/python -m pytest tests $(PARALLEL)

test-full: $(DEV)
	$(BIN)/python -m pytest tests --full $(PARALLEL)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

bench: $(SERVE)
	$(BIN)/python -m perf.engine.variants

bench-serve: $(DEV)
	$(BIN)/python -m perf.serving.small

figures: $(DEV)
	$(BIN)/python -m perf.gallery.figures

clean:
	rm -rf .demo .pytest_cache .ruff_cache .mypy_cache

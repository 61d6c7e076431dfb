# `make demo` and `make test` do all their set-up on a fresh machine with Python 3.11; no hub access is needed.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
TORCH  := torch==2.13.0

.PHONY: demo test lint types check clean

demo: $(VENV)/.demo
	$(BIN)/mxrl demo --out demo

test: $(VENV)/.dev lint types check

lint:
	$(BIN)/ruff check src tests experiments benchmarks
	$(BIN)/ruff format --check src tests experiments benchmarks

types:
	$(BIN)/pyright

check:
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

# torch's pin goes in first: a plain `torch`, pulled by another package, would bring gigabytes of CUDA.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) --editable '.[train]'
	touch $@

# fouroversix needs torch at build time, outside build isolation, so it can't stand in an extra.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) --editable '.[dev]'
	SKIP_CUDA_BUILD=1 $(PIP) --no-build-isolation --no-cache-dir fouroversix==1.0.5
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info

# `make demo` and `make test` do all their set-up on a fresh machine with Python 3.11; no hub access is needed.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
TORCH  := torch==2.13.0

.PHONY: demo test oracles lint types check clean

demo: $(VENV)/.demo
	$(BIN)/mxrl demo --out demo

test: $(VENV)/.dev $(VENV)/oracles/.complete lint types check

lint:
	$(BIN)/ruff check src tests experiments benchmarks
	$(BIN)/ruff format --check src tests experiments benchmarks

types:
	$(BIN)/pyright

check:
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

# torch's pin goes in first: a plain `torch`, pulled by another package, would bring gigabytes of CUDA.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) --editable '.[train]'
	touch $@

# fouroversix needs torch at build time, outside build isolation, so it can't stand in an extra; megatron-core's layers
# need nothing of what it asks for.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) --editable '.[dev]'
	SKIP_CUDA_BUILD=1 $(PIP) --no-build-isolation --no-cache-dir fouroversix==1.0.5
	$(PIP) --no-deps megatron-core==0.16.1
	touch $@

# GPTQModel packs and unpacks GPTQ and AWQ for the tests. In a folder of its own: peft refuses to be imported beside it.
oracles: $(VENV)/oracles/.complete

$(VENV)/oracles/.complete: $(VENV)/.torch
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/oracles gptqmodel==7.7.0 \
		logbar==0.4.15 device-smi==0.5.7 pypcre==0.6.4 tokenicer==0.0.14 defuser==0.0.28 threadpoolctl==3.8.0
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info

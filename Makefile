# Everything that a checkout needs. `make verify` starts from nothing but Python 3.10 or newer; README.md says more.
#
#   make verify     build every spec into generated/ and check each kernel against float64
#   make test       the tests
#   make smoke      some of every kind: specs, plans, goldens, kernels of each family, the emulator, the docs
#   make lint       formatting, ruff, types
#   make format     mend formatting and what ruff can mend
#   make drift      fail if generated/ is not what the specs and templates give for the reference release of Triton
#   make renew      write anew what the tests compare with: golden files, messages of broken specs, the JSON Schema
#   make inspect    hold what the compiler makes of the shipped specs to their limits
#   make compiled   execute a sample of what the compiler makes for AMD, on the CPU, against float64
#   make wheel      build a wheel, install it alone and use it outside of the checkout
#   make newest     build, compile and verify one spec of each family under the newest release of Triton

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
RELEASES := mla_codegen/catalog/releases.py
REFERENCE := $(shell sed -n 's/^REFERENCE = "\([^"]*\)".*/\1/p' $(RELEASES))
NEWEST ?= $(shell sed -n 's/^    Release."[0-9.]*", "\([0-9.]*\)".*/\1/p' $(RELEASES) | tail -n 1)
TRITON ?= triton==$(REFERENCE)
JOBS ?= 2
SPECS ?= $(sort $(wildcard specs/*.yaml))

BIN := $(VENV)/bin
READY := $(VENV)/.ready-for-mla-codegen

.PHONY: verify test smoke lint format drift renew inspect compiled wheel newest

verify: $(READY)
	$(BIN)/mla-codegen build $(SPECS)
	$(BIN)/mla-codegen verify $(SPECS)

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

SMOKE := tests/spec tests/plan tests/test_rooms.py tests/test_docs.py tests/check/emulate tests/check/test_workers.py \
  tests/render/test_render.py::test_golden tests/kernels/test_cdna.py tests/kernels/test_hopper.py \
  tests/kernels/test_paged.py tests/kernels/test_modes.py::test_ragged_lengths tests/runtime/test_calls.py \
  tests/cli/test_commands.py::test_errors_as_json
SLOW := test_nothing_spills or test_examples

smoke: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(SMOKE) -k 'not ($(SLOW))'

lint: $(READY)
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

format: $(READY)
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

drift: $(READY)
	$(BIN)/mla-codegen check $(SPECS) --triton $(REFERENCE)

inspect: $(READY)
	$(BIN)/mla-codegen inspect $(filter-out specs/portable%,$(SPECS)) --check --sample
	$(BIN)/mla-codegen inspect specs/portable.yaml --check --shape 64x8192
	$(BIN)/mla-codegen inspect specs/portable_paged.yaml --check --shape 64x8192 --kv bf16

compiled: $(READY)
	$(BIN)/mla-codegen verify specs/mi300.yaml specs/mi355x.yaml --compiled --quick --shape 64x8192 --shape 256x1024

renew: $(READY)
	$(BIN)/mla-codegen schema > mla-codegen.schema.json
	RENEW=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

newest: $(READY)
	scripts/try-triton $(BIN)/python $(NEWEST)

wheel: $(READY)
	scripts/try-wheel $(BIN)/python

# The environment, made once and again when pyproject.toml changes. A torch that Python already has is used, and so is
# the triton that comes with it; only what is missing is installed.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is older than Python 3.10: name a newer one, as in  make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv \
	  $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install $(TRITON)
	$(BIN)/python -m pip install --editable '.[dev]'
	@touch $@

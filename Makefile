# make demo | make test are all a newcomer needs; `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where packages come from; empty means pip's own configuration (usually PyPI).
INDEX ?=
# Where the CPU build of torch comes from when pip's own configuration offers none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := torch==2.13.0+cpu
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(if $(INDEX),--index-url $(INDEX))
PYTEST := $(BIN)/python -m pytest

.PHONY: help install check test coverage test-pythons e2e e2e-long golden demo search-demo overhead schema clean explain-speed fuzz mutation gpu-measure gpu-launch
.DELETE_ON_ERROR:

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed  ## set everything up in .venv

# torch comes first: with its CPU build in place, nothing later pulls the CUDA packages in.
$(VENV)/.installed: requirements/cpu.txt requirements/engine.txt requirements/constraints.txt pyproject.toml setup.py
	@echo "setting up $(VENV) (about 3 minutes, 2.6 GB)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.3" -c requirements/constraints.txt
	$(PIP) "$(TORCH)" -c requirements/constraints.txt || $(PIP) "$(TORCH)" --extra-index-url $(TORCH_INDEX) -c requirements/constraints.txt
	$(PIP) -r requirements/cpu.txt -c requirements/constraints.txt
	$(PIP) --no-deps -r requirements/engine.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

check: install  ## lint, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

FAST := -m "not e2e and not e2e_long"
COVERED := $(BIN)/python -m slipcover --omit 'tests/*,benchmarks/*,setup.py'
test: install  ## every test that needs no SGLang engine, and the share of the code that they run
	$(COVERED) --json --out .coverage.json -m pytest $(FAST)
	@$(BIN)/python -c "import json; print('coverage:', json.load(open('.coverage.json'))['summary']['percent_covered_display'], '% of the lines of every module that a test imports')"

coverage: install  ## the same by module, with the lines that no fast test runs
	$(COVERED) --skip-covered -m pytest $(FAST)

# The core without torch and the engine, whose wheels for these versions bring CUDA packages along.
PYTHONS ?= python3.12 python3.13
CORE_TESTS := tests/policies tests/orchestrator tests/launchers/frameworks
test-pythons:  ## the fast tests of the core on other Pythons, where one is installed
	@for python in $(PYTHONS); do \
		$$python -c '' 2>/dev/null || { echo "$$python: not installed, skipped"; continue; }; \
		$$python -m venv .venv-$$python && \
		.venv-$$python/bin/python -m pip install --quiet --upgrade "pip>=25.3" && \
		.venv-$$python/bin/python -m pip install --quiet -e . --group dev -c requirements/constraints.txt && \
		.venv-$$python/bin/python -m pytest -m "not e2e and not e2e_long" $(CORE_TESTS) || exit 1; \
	done

e2e: install  ## real Ray, SGLang and out-of-memory failures
	$(PYTEST) -m e2e tests

e2e-long: install  ## the same, minutes each
	$(PYTEST) -m e2e_long --timeout 3600 tests

golden: install  ## compare every recorded decision: launches, searches, look-alikes, explain's advice
	$(BIN)/python -m benchmarks.golden

COUNT ?= 400
mutation: install  ## a sample of COUNT mutants of the policies against their tests; hours, goes on where it stopped
	$(BIN)/python -m pip install --quiet --group mutation -c requirements/constraints.txt
	$(BIN)/python -m benchmarks.mutation --count $(COUNT)

demo: install  ## recover the built-in job from real out-of-memory failures, then let the estimate avoid them, without what the first run taught
	$(BIN)/autotune launch configs/builtin-cpu.yaml --policy ladder
	XDG_CACHE_HOME=$$(mktemp -d) $(BIN)/autotune launch configs/builtin-cpu.yaml

search-demo: install  ## search for a faster configuration of a timid job, about 20 minutes
	$(BIN)/autotune search configs/search-demo.yaml

overhead: install  ## what autotune itself costs
	$(BIN)/python -m benchmarks.overhead

explain-speed: install  ## how fast explain reads a log of 1 GiB, against grep
	$(BIN)/python -m benchmarks.explain

# atheris is no requirement of anything else; FUZZ_SECONDS=0 runs until it is interrupted.
FUZZ_SECONDS ?= 300
fuzz: install  ## look for a log that breaks explain
	$(PIP) atheris==3.0.0
	$(BIN)/python -m tests.fuzz.explain .fuzz -artifact_prefix=.fuzz/ -max_total_time=$(FUZZ_SECONDS) -max_len=20000 -timeout=60

# Both need an NVIDIA GPU and say so (exit 3) where there is none; the first needs torch and transformers alone.
OUT ?= benchmarks/gpu/measurements/$(shell hostname).jsonl
gpu-measure:  ## peaks and real OOMs of one trainer, on a GPU
	$(PYTHON) benchmarks/gpu/measure.py --out $(OUT)

gpu-launch:  ## recover the built-in job, and installed frameworks' jobs, on a GPU
	$(PYTHON) benchmarks/gpu/launch.py

schema: install  ## write configs/job.schema.json and docs/job.md
	$(BIN)/python -m autotune.orchestrator.config.json_schema > configs/job.schema.json
	$(BIN)/python -m autotune.orchestrator.config.json_schema --page > docs/job.md

clean:  ## remove .venv and caches
	rm -rf $(VENV) .venv-python3.* build src/*.egg-info .mypy_cache .ruff_cache .hypothesis

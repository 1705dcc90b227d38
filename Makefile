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
# Processes that share the tests. The tests of one file stay together: its fixtures are made once.
JOBS ?= 2
SHARED = -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 25 --durations-min 5

unexport PYTHONDONTWRITEBYTECODE  # which some images set: what one process compiles, the next one finds

.PHONY: help install wheel check test coverage test-pythons test-lowest ray-versions e2e e2e-long real real-vllm golden demo search-demo overhead faults-storage schema facts clean explain-speed faults soak fuzz properties mutation report-page man docs pictures pip-audit gpu-measure gpu-launch gpu-real
.DELETE_ON_ERROR:

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed  ## set everything up in .venv

# torch comes first: with its CPU build in place, nothing later pulls the CUDA packages in.
$(VENV)/.installed: requirements/cpu.txt requirements/engine.txt requirements/constraints.txt pyproject.toml setup.py
	@echo "setting up $(VENV) (about 3 minutes, 3.2 GB)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.3" -c requirements/constraints.txt
	$(PIP) "$(TORCH)" -c requirements/constraints.txt || $(PIP) "$(TORCH)" --extra-index-url $(TORCH_INDEX) -c requirements/constraints.txt
	$(PIP) -r requirements/cpu.txt -c requirements/constraints.txt
	$(PIP) --no-deps -r requirements/engine.txt
	$(BIN)/python -m pip uninstall --quiet --quiet --yes autotune  # the distribution's name in a .venv from before rl-autotune
	rm -rf src/autotune.egg-info  # the same: SGLang would find its entry points twice
	$(PIP) --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -q launchers orchestrator policies  # images may set PYTHONDONTWRITEBYTECODE
	@touch $@

wheel:  ## build dist/rl_autotune-VERSION-py3-none-any.whl; needs no .venv
	rm -rf build/lib  # setuptools would pack what an earlier build left there
	$(PYTHON) -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir dist .

check: install  ## lint, types, import directions
	$(BIN)/hadolint Dockerfile
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Many of these tests wait for a process or a clock: one process more than this machine's two cores keeps them busy.
FAST = $(SHARED) -m "not e2e and not e2e_long"
test: JOBS = 3
test: install  ## every test that needs no SGLang engine
	$(PYTEST) $(FAST)

# Counting takes a fifth of the time of the tests, so that CI does without. A frozen module of Python's own has the file
# name "frozen", which would count as one of this folder.
coverage: install  ## the same, with the share of each module's lines that they run, and the lines that none runs
	$(BIN)/python -m slipcover --omit 'tests/*,benchmarks/*,setup.py,frozen' --skip-covered -m pytest $(FAST)

# The core without torch and the engine, whose wheels for these versions bring CUDA packages along.
PYTHONS ?= python3.12 python3.13
CORE_TESTS := tests/policies tests/orchestrator tests/launchers/frameworks
test-pythons:  ## the fast tests of the core on other Pythons, where one is installed
	@for python in $(PYTHONS); do \
		$$python -c '' 2>/dev/null || { echo "$$python: not installed, skipped"; continue; }; \
		$$python -m venv .venv-$$python && \
		.venv-$$python/bin/python -m pip install --quiet --upgrade "pip>=25.3" && \
		.venv-$$python/bin/python -m pip install --quiet -e '.[ray]' --group dev -c requirements/constraints.txt && \
		.venv-$$python/bin/python -m pytest -m "not e2e and not e2e_long" $(CORE_TESTS) || exit 1; \
	done

# What autotune names has the lowest version that pyproject.toml allows, what that brings in the newest that fits.
LOWEST_TESTS ?= $(CORE_TESTS)
UV_PIP := $(BIN)/uv pip $(if $(INDEX),--default-index $(INDEX))
test-lowest: install  ## the fast tests of the core on the lower bounds of its dependencies
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-lowest
	$(UV_PIP) compile --quiet pyproject.toml --extra ray --group test --resolution lowest-direct -o .venv-lowest/versions.txt
	$(UV_PIP) sync --quiet --python .venv-lowest/bin/python .venv-lowest/versions.txt
	$(BIN)/uv pip install --quiet --no-deps --python .venv-lowest/bin/python -e .
	.venv-lowest/bin/python -m pytest -m "not e2e and not e2e_long" $(LOWEST_TESTS) \
		--deselect tests/orchestrator/config/test_loader.py::test_the_committed_schema_is_current  # of the pinned pydantic

ray-versions: install  ## the runners' tests on the oldest and the newest supported Ray; 25 minutes on a busy machine
	$(BIN)/python -m tests.launchers.runners.ray_versions

SEED ?= $(shell date +%Y%m%d)
properties: install  ## the property tests with other examples than those of CI, today's; SEED=20261129 draws that day's again
	$(PYTEST) $(SHARED) --hypothesis-profile drawn --hypothesis-seed $(SEED) -m "not e2e and not e2e_long" \
		$$(grep -rlw hypothesis tests --include="test_*.py")

# Only the files that have one, so that each process collects 500 tests instead of 11,200; the longest first, so that
# neither process is left alone with one of them at the end.
E2E = tests/e2e/test_recovery.py tests/faults/test_faults.py tests/e2e/test_lookalikes.py tests/e2e/test_prevention.py \
	tests/e2e/test_search.py tests/e2e/test_engine.py tests/e2e/test_parallel.py \
	$(sort $(shell grep -rlw "mark.e2e" tests --include="test_*.py"))
e2e: JOBS = 3
e2e: install  ## real Ray, SGLang and out-of-memory failures
	$(PYTEST) $(SHARED) -m e2e $(E2E)

e2e-long: install  ## what CI leaves out: the other frameworks' look-alikes, learning, real trainers; before a release
	$(PYTEST) -m e2e_long --timeout 3600 tests

CASES ?=
REAL = @mkdir -p build; $(PYTEST) $(SHARED) -v --durations 0 --timeout 3600 --basetemp build/real \
	--results tests/real/results.jsonl $(1) $(CASES); ended=$$?; $(BIN)/python -m tests.real.results && exit $$ended
real: install  ## real verl, AReaL, TRL and ms-swift out of memory, recovered; 28 minutes, 8 GB of packages once; CASES="-k backward" runs some
	$(BIN)/python -m tests.contracts.environments verl areal-trainer ms-swift trl
	$(call REAL,tests/real/test_verl.py tests/real/test_areal.py tests/real/test_hugging_face.py)

real-vllm: install  ## real verl with its own vLLM server out of memory, recovered; 5 minutes, 5 GB of packages once
	$(BIN)/python -m tests.contracts.environments verl verl-vllm
	$(call REAL,tests/real/test_verl_vllm.py)

golden: install  ## compare every recorded decision: launches, searches, look-alikes, explain's advice
	$(BIN)/python -m benchmarks.golden

COUNT ?= 400
mutation: install  ## a sample of COUNT mutants of the policies against their tests; hours, goes on where it stopped
	$(BIN)/python -m pip install --quiet --group mutation -c requirements/constraints.txt
	$(BIN)/python -m benchmarks.mutation --count $(COUNT)

facts: install  ## what the newest releases of frameworks and engines changed against the facts on record, by knob and key
	$(PIP) --group facts -c requirements/constraints.txt
	for each in verl areal skyrl trl ms-swift openrlhf sglang vllm; do $(BIN)/python -m benchmarks.facts $$each --newest || exit 1; done
	$(BIN)/python -m benchmarks.facts.tags

pip-audit: install  ## known vulnerabilities of what is installed; asks PyPI's and OSV's database, so it needs the network
	$(BIN)/python -m pip install --quiet --group audit
	$(BIN)/python -m pip_audit --local --skip-editable

demo: install  ## recover the built-in job from real out-of-memory failures, let the estimate avoid them, and meet a late one in a rehearsal
	$(BIN)/autotune launch configs/builtin-cpu.yaml --policy ladder
	XDG_CACHE_HOME=$$(mktemp -d) $(BIN)/autotune launch configs/builtin-cpu.yaml
	$(BIN)/autotune launch --rehearse configs/builtin-rehearsal.yaml

search-demo: install  ## search for a faster configuration of a timid job, about 20 minutes
	$(BIN)/autotune search configs/search-demo.yaml

overhead: install  ## what autotune itself costs
	$(BIN)/python -m benchmarks.overhead

report-page: install  ## the report's page in a headless Chromium, at the width of a telephone and of a desk
	@command -v chromium chromium-browser google-chrome chrome || { echo "no Chromium here: apt-get install chromium"; exit 1; }
	$(PYTEST) tests/orchestrator/report/test_page.py

man: install  ## manual pages of all commands in build/man, made of their --help
	@command -v help2man || { echo "no help2man here: apt-get install help2man"; exit 1; }
	mkdir -p build/man
	for name in "" $$($(BIN)/python -c "from autotune.orchestrator.cli import COMMANDS; print(*COMMANDS)"); do \
	  page=build/man/autotune$${name:+-$$name}.1; \
	  help2man --no-info --version-string="$$($(BIN)/autotune --version)" --name="memory of reinforcement-learning jobs" \
	    --output="$$page" "$(BIN)/autotune $$name" || exit 1; \
	  sed -i -e "s/^autotune .- /autotune$${name:+-$$name} - /" -e '/^Example:/,/^\.SH/s/^autotune/.br\n&/' "$$page"; done

docs: install  ## build the documentation in build/site, with its links checked
	$(BIN)/python -m docs.site

RUN ?= $(shell ls -td runs/*/ 2>/dev/null | head -1)
pictures: install  ## docs/pictures anew from RUN, a folder such as runs/7c1e: its journal, how it looked, its report
	$(BIN)/python -m docs.site.pictures $(RUN)

SEEDS ?= 3
faults-storage: install  ## every error of a file system at every moment of a run; 15 minutes, not in CI (a part is in test)
	$(BIN)/python -m tests.faults.storage

faults: install  ## faults of node, driver, disk, card and job while a job trains; hours, goes on where it stopped
	$(BIN)/python -m tests.faults --seeds $(SEEDS); status=$$?; $(BIN)/python -m tests.faults --page && exit $$status

soak: install  ## what a long run costs the driver: 1,000 attempts, 64 on Ray, 256 workers' logs
	$(BIN)/python -m benchmarks.soak --page

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

# PACKAGES is a folder that `python -m benchmarks.gpu.pack` wrote; empty where TRL and verl are installed.
PACKAGES ?=
gpu-real:  ## recover TRL and verl from real OOMs, on a GPU
	$(PYTHON) benchmarks/gpu/real.py --out runs/gpu-real $(if $(PACKAGES),--packages $(PACKAGES))

schema: install  ## write configs/job.schema.json, configs/schemas and docs/job.md
	$(BIN)/python -m docs.site.job_schema > configs/job.schema.json
	$(BIN)/python -m docs.site.job_schema --page > docs/job.md
	$(BIN)/python -m docs.site.json_documents configs/schemas

clean:  ## remove .venv and caches
	rm -rf $(VENV) .venv-python3.* .venv-lowest build dist src/*.egg-info .mypy_cache .ruff_cache .hypothesis

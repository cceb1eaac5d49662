# `make demo` and `make test` need Python 3.11 to 3.13 with venv, and make; everything else they fetch themselves.
VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && { echo $$p; break; }; done)
READY := $(VENV)/.setup-complete
# The releases of LMCache besides the installed one that the adaptations are tested against.
LMCACHE_VERSIONS := 0.5.4 0.5.5
PYTEST = $(VENV)/bin/python -m pytest
# Two files at a time: starting an engine keeps little more than one core busy, and three of them fit into 24 GiB twice.
BESIDE := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Long ones first, so that both workers end together; a folder of tests/ that is not named here is not run.
TESTS := $(addprefix tests/,engine proxy patches integration faults unit)
# How often `make faults` kills a process, and one of four that share a namespace, and how long its threads race, in seconds.
KILLS ?= 1000
NEIGHBOURS ?= 100
RACE ?= 60

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-integration test-engine test-proxy test-patches faults soak lint overlays \
	clean

help:
	@echo 'make demo              a prompt survives an engine restart, shown on this machine without a GPU'
	@echo 'make test              all tests'
	@echo 'make test-unit         seconds, no engine'
	@echo 'make test-integration  the real LMCache on CPU tensors'
	@echo 'make test-engine       the real vLLM on the CPU, through every door'
	@echo 'make test-proxy        the real LiteLLM proxy'
	@echo 'make test-patches      every affected release of vLLM (minutes, some 130 MB each)'
	@echo 'make faults            the long fault campaign: a thousand kills, every failing call, races (some ten minutes)'
	@echo 'make soak              a real engine for ten minutes while its cache directory is damaged (some 25 minutes in all)'
	@echo 'make lint              ruff and mypy'
	@echo 'make clean             remove the environment and what was fetched into this folder'

# DEMO takes options of `kvtier demo`: make demo DEMO='--model random --json result.json'
demo: $(READY)
	@$(VENV)/bin/kvtier demo $(DEMO)

# One pytest for all of it, so that its summary is the last word; .ci/run reads the status that make would change to 2.
test: $(READY) overlays
	@mkdir -p .cache && rm -f .cache/pytest-status
	@$(PYTEST) $(BESIDE) -m 'not matrix and not long' $(TESTS); status=$$?; echo $$status > .cache/pytest-status; exit $$status

test-unit: $(READY)
	@$(PYTEST) $(BESIDE) tests/unit

test-integration: $(READY) overlays
	@$(PYTEST) tests/integration

test-engine: $(READY)
	@$(PYTEST) $(BESIDE) tests/engine

test-proxy: $(READY) overlays
	@$(PYTEST) tests/proxy

# Every release of the matrix, some 130 MB each at the first run; `make test` takes two of them.
test-patches: $(READY)
	@$(PYTEST) tests/patches tests/unit/kvpatches

# The short forms of these are part of `make test`; docs/reliability.md has the figures of the last long run.
faults: $(READY)
	@$(VENV)/bin/python -m tests.faults.campaign --kills $(KILLS)
	@$(VENV)/bin/python -m tests.faults.neighbours --kills $(NEIGHBOURS)
	@$(VENV)/bin/python -m tests.faults.stress --seconds $(RACE)
	@$(VENV)/bin/python -m tests.faults.stress --seconds $(RACE) --codec zstd
	@$(PYTEST) tests/faults

# SOAK takes options: make soak SOAK='--minutes 60 --json result.json'
soak: $(READY)
	@$(VENV)/bin/python -m tests.soak $(SOAK)

lint: $(READY)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy

setup: $(READY)

$(READY): pyproject.toml requirements/test-env.txt scripts/setup.py
	@test -n '$(PYTHON)' || { echo 'No Python 3.11, 3.12 or 3.13 was found; install one, or name it: make PYTHON=…' >&2; exit 1; }
	@$(PYTHON) scripts/setup.py '$(VENV)'

overlays: $(READY)
	@for version in $(LMCACHE_VERSIONS); do \
		$(VENV)/bin/python scripts/fetch_release.py .cache/lmcache/$$version lmcache==$$version || exit 1; done
	@$(VENV)/bin/python scripts/fetch_release.py .cache/litellm/1.110.2 litellm==1.110.2 semver==3.1.2

clean:
	rm -rf '$(VENV)' .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

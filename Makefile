# Each target does its own set-up; `make` alone lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.installed
# Downloads are shown. Python compiles what it imports, which is a small part of torch.
PIP := $(BIN)/pip install --disable-pip-version-check --no-compile
INSTALL := $(PIP) -c constraints.txt
# LOCKED=1, as CI has it, installs what requirements.lock says and nothing else, each file held against its hash.
LOCKED ?=
LOCK := requirements.lock
FROM_LOCK := $(PIP) --require-hashes -r $(LOCK) && $(PIP) --no-deps --no-build-isolation -e .
# What makes the lock and looks through it has packages of its own.
LOCKING := $(VENV)/locking

.DEFAULT_GOAL := help
.PHONY: help sweep test test-versions test-long soak fuzz vllm-smoke mutation results lint types format lock audit unpack clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

sweep: $(RUNTIME) ## Measure --tp 8 --dcp 8 and its dcp 1 baseline on this machine, write a report into runs/
	$(BIN)/dcpbench sweep --tp 8 --dcp 8 $(ARGS)

# Many tests wait for what they started, so there are more processes than cores of a small machine.
PYTEST := $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

test: $(STAMP) ## Run the test suite, but for its long tests and those of pages in a browser
	$(PYTEST) -m "not long and not browser and not soak" $(ARGS)

test-versions: $(STAMP) ## Run the tests of reports and commands with the lowest and the newest versions of pandas, Matplotlib, Typer, msgspec
	$(BIN)/python -m tools.version_tests $(ARGS)

test-long: $(STAMP) ## Run the other tests: real jobs of many ranks, killed sweeps, charts of pages in a browser
	$(PYTEST) -m "(long or browser) and not soak" $(ARGS)

SOAK := runs/soak

soak: $(STAMP) ## Run the whole table of faults and all hostile servers, then 500 random kills of sweeps of 200 points: an hour or two
	@mkdir -p $(SOAK)
	$(PYTEST) tests/faults --dist load --junitxml=$(SOAK)/faults.xml
	$(PYTEST) -m soak tests/servers/test_hostile.py
	$(BIN)/python -m tools.kills --kills 500 --points 200 --quick --out $(SOAK)/kills-quick.jsonl
	$(BIN)/python -m tools.kills --kills 500 --points 200 --minutes 240 --out $(SOAK)/kills-real.jsonl

fuzz: $(STAMP) ## Hand every reader of files a million damaged ones
	@mkdir -p $(SOAK)
	$(BIN)/python -m tools.fuzz --out $(SOAK)/fuzz.jsonl

vllm-smoke: $(STAMP) ## Install vLLM for the CPU (3.5 GB) below runs/ and run server, sweep, verify and replays against it
	$(BIN)/python -m tools.vllm_smoke $(ARGS)

mutation: $(STAMP) ## Change 500 lines one at a time, and say which no test sees
	@mkdir -p $(SOAK)
	$(INSTALL) -e '.[mutation]'
	test -e $(SOAK)/covered.sqlite || $(BIN)/python -m tools.mutation cover --data $(SOAK)/covered.sqlite
	$(BIN)/python -m tools.mutation run --data $(SOAK)/covered.sqlite --out $(SOAK)/mutants.jsonl

unpack: $(RUNTIME) ## Unpack the raw records of all results (results/**/raw.tar.xz)
	$(BIN)/python -m tools.results unpack

results: unpack ## Write the reports under results/ again, from their raw records (results/reports.txt)
	@grep -v '^#' results/reports.txt | while read -r folder args; do \
		echo "results/$$folder: dcpbench report $$args"; \
		(cd "results/$$folder" && "$(abspath $(BIN))/dcpbench" report $$args >/dev/null </dev/null) || exit 1; \
	done

lint: $(STAMP) ## Check style, formatting and the directions of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP) ## Check types, strictly where there is no torch
	$(BIN)/mypy

format: $(STAMP) ## Rewrite the sources as `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: $(STAMP) $(LOCKING)/bin/uv ## Write requirements.lock again, what CI installs, from pyproject.toml and constraints.txt
	$(BIN)/python -m tools.lock $(LOCKING)/bin/uv

audit: $(LOCKING)/bin/pip-audit ## Ask the package index for known vulnerabilities of what CI installs
	$< --requirement $(LOCK) --disable-pip --require-hashes --strict --progress-spinner off

clean: ## Remove the virtual environment and all caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# What measuring takes; the suite and the linters come into the same folder once they are asked for.
$(RUNTIME): pyproject.toml $(if $(LOCKED),$(LOCK),constraints.txt)
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) here; on Debian: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing dcpbench and what it needs into $(VENV); the first time takes minutes, most of them for torch."
	$(if $(LOCKED),$(FROM_LOCK),$(INSTALL) -e .)
	@touch $@

$(STAMP): $(RUNTIME)
	@echo "Installing the test suite and the linters into $(VENV)."
	$(if $(LOCKED),@echo "They came with $(LOCK).",$(INSTALL) -e '.[test,dev]')
	@touch $@

$(LOCKING)/bin/uv $(LOCKING)/bin/pip-audit: $(RUNTIME)
	test -x $(LOCKING)/bin/pip || $(PYTHON) -m venv $(LOCKING)
	$(LOCKING)/bin/pip install --disable-pip-version-check --no-compile $(@F)

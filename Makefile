# Everything a developer types. `make help` lists it.
#
# PYTHON           the interpreter that makes the environment     (python3)
# VENV             the environment                                (.venv)
# TORCH_INDEX_URL  a package index that has torch for this machine; without one pip's own choice
#                  is taken, which on Linux may bring gigabytes of CUDA libraries along. PyTorch's
#                  index of CPU builds: TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
# JOBS             how many tests run side by side (4; they wait more than they compute)
# ARGS             further arguments for pytest: make test ARGS='-k clock -x'
# SCENARIO         make demo: why the rank is slow: host, loader, compute, gc or checkpoint (host)
# TRUTH            make truth: a further folder of recordings with its truth.json
# LARGE            make bench: a folder with two large reports to merge
# TRACES           make bench: a folder with two large traces of torch.profiler to merge
# SECONDS          make fuzz: for how long (600)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# What is installed here is compiled where it is first imported, and kept.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX_URL ?=
JOBS ?= 4
ARGS ?=
LARGE ?=
TRACES ?=
TRUTH ?=
SCENARIO ?= host
SECONDS ?= 600
# Exactly one torch: a range would let pip replace a build for this machine by the newest of all.
# The only thing that is installed without a hash, with NVIDIA's libraries for a build with CUDA:
# every index has builds of its own. What else it depends on is in the lock.
TORCH := torch==2.13.0
LOCK := tests/requirements.txt

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --only-binary :all:
# Four times as quick as pip with the packages of the lock. Torch stays with pip, whose settings
# say where this machine's build is.
UV_INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python --only-binary :all:
# What most tests import, compiled once, two at a time: ranks that start together would all do it.
comma := ,
COMPILED := torch$(comma)torch._dynamo$(comma)torch.distributed \
  pandas$(comma)pyarrow.parquet$(comma)hypothesis$(comma)pytest$(comma)xdist
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup
SHELL_SCRIPTS = $(shell git ls-files '*.sh' '*.sbatch' .ci/run)

.PHONY: help
help: ## list what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@sed -n '3,/^$$/ s/^# /  /p' $(firstword $(MAKEFILE_LIST))

$(READY): pyproject.toml $(LOCK) Makefile
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) ($$($(BIN)/python --version))" >&2
	@awk '/^[a-z]/ { is_uv = /^uv==/ } is_uv' $(LOCK) >$(VENV)/uv.txt
	@$(INSTALL) --require-hashes --no-deps --requirement $(VENV)/uv.txt
	@$(UV_INSTALL) --require-hashes --no-deps --requirement $(LOCK)
	@$(INSTALL) $(if $(TORCH_INDEX_URL),--index-url '$(TORCH_INDEX_URL)') '$(TORCH)'
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@$(foreach modules,$(COMPILED),$(BIN)/python -c 'import $(modules)' &) wait
	@touch $@

.PHONY: lock
lock: $(READY) ## write the lock anew from pyproject.toml (ARGS=--upgrade: with the newest of all)
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	  --only-binary :all: --group test --group lint --group docs --group release --group torch \
	  --no-annotate --custom-compile-command 'make lock' --excludes <(printf '%s\n' torch playwright debugpy) \
	  --output-file $(LOCK) $(ARGS) pyproject.toml
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-deps \
	  --no-annotate --custom-compile-command 'make lock' \
	  --output-file tests/lab/deepspeed.txt $(ARGS) tests/lab/deepspeed.in

.PHONY: venv
venv: $(READY) ## the environment with clusterprof, torch and the test tools

.PHONY: parts
parts: ## install the real parts the tests use (Slurm, nsys, Chromium; root, Debian)
	@tests/lab/install.sh
	@$(firstword $(wildcard $(BIN)/python) $(PYTHON)) tests/lab/perfetto_ui.py

.PHONY: deepspeed
deepspeed: $(READY) ## install and compile DeepSpeed, a minute, for `make long`
	@$(BIN)/python tests/lab/deepspeed.py

.PHONY: test
test: $(READY) parts ## run all tests, on real parts: what has to pass before a change lands
	@$(PYTEST) $(ARGS)

.PHONY: unit
unit: $(READY) ## run the unit tests: no study of a recording, no process, a minute
	@$(PYTEST) tests/unit $(ARGS)

.PHONY: science
science: $(READY) ## run the tests that study recordings and simulated jobs: three minutes
	@$(PYTEST) tests/science $(ARGS)

.PHONY: golden
golden: $(READY) ## compare all results, tables, pages and plans with those kept (ARGS=--write: keep)
	@$(PYTEST) tests/golden -m '' $(ARGS)

.PHONY: long
long: $(READY) parts deepspeed ## run what is no question at every change: sizes, frameworks, fuzzing
	@$(PYTEST) -m long $(ARGS)

.PHONY: lint
lint: $(READY) ## ruff, mypy, import layers, shell scripts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/shellcheck $(SHELL_SCRIPTS)

.PHONY: format
format: $(READY) ## let ruff mend and format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: demo
demo: $(READY) ## profile a real four-rank training that has one slow rank (SCENARIO=loader, …)
	@PATH="$(abspath $(BIN)):$$PATH" SCENARIO='$(SCENARIO)' scripts/demo.sh

.PHONY: faults
faults: $(READY) parts ## end a rank in every way, with and without clusterprof, and print a table
	@CLUSTERPROF_TESTS_FAULTS=1 $(BIN)/python -m pytest -q -m '' tests/integration/test_endings*.py \
		tests/integration/test_reduce.py tests/integration/test_secrets.py \
		tests/integration/test_ssh_lies.py $(ARGS)

.PHONY: bench
bench: $(READY) ## measure the project's figures against their limits
	@PYTHONPATH=tests $(BIN)/python bench/run.py $(if $(LARGE),--large '$(LARGE)') $(if $(TRACES),--traces '$(TRACES)') \
		$(ARGS)

.PHONY: capture
capture: $(READY) ## measure what starting and stopping a capture costs, for each way to do it
	@$(BIN)/python bench/capture.py $(ARGS)

.PHONY: truth
truth: $(READY) ## clocks and verdicts against the truth, on recordings and simulated jobs
	@PYTHONPATH=tests $(BIN)/python bench/truth.py $(if $(TRUTH),--folder '$(TRUTH)') $(ARGS)

.PHONY: fuzz
fuzz: $(READY) ## spoil everything that is read, for SECONDS, and see that it ends in words
	@cd tests && '$(abspath $(BIN))/python' -m fuzz.run $(SECONDS) $(ARGS)

.PHONY: readme
readme: $(READY) ## write the outputs and the picture in README.md anew
	@$(BIN)/python scripts/readme.py

.PHONY: schema
schema: $(READY) ## write docs/results.schema.json anew, from the types of results.json
	@$(BIN)/python scripts/results_schema.py

.PHONY: man
man: $(READY) ## build the manual page, build/man/clusterprof.1
	@mkdir -p build/man
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --target build/argparse-manpage \
	  --no-deps --no-build-isolation --require-hashes --requirement scripts/manpage.txt
	@COLUMNS=10000 PYTHONPATH=build/argparse-manpage $(BIN)/python build/argparse-manpage/bin/argparse-manpage \
	  --module clusterprof.cli.completion --function every_verb --format single-commands-section \
	  --project-name clusterprof --manual-title 'User Commands' --output build/man/clusterprof.1 \
	  --description 'which rank of a distributed training delays the others, and why'
	@echo build/man/clusterprof.1

.PHONY: dist
dist: $(READY) man ## build the sdist and the wheel into dist/, and the manual page
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist .

.PHONY: docs
docs: $(READY) ## build the documentation's site, build/docs/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict $(ARGS)
	@echo "build/docs/index.html"

.PHONY: changelog
changelog: $(READY) ## show what the fragments in changelog.d will say
	@$(BIN)/towncrier build --draft --version "$$($(BIN)/python -c 'import clusterprof; print(clusterprof.__version__)')"

.PHONY: clean
clean: ## remove what building and testing left (not runs/, not the environment)
	@rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage*
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 -r rm -rf

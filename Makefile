# Holdfast: everything a contributor runs.
#
#   make demo     train, kill in the middle of a save, resume, prove equality, show speed
#   make test     everything that is not opt-in
#   make check    ruff, mypy --strict, import-linter, clang-format
#   make format   let ruff and clang-format rewrite the files
#   make build    rebuild the native module after a change in native/ (seconds)
#   make compat   what needs no torch, on another Python: PYTHON=python3.10 WITH="numpy==1.24.0 msgspec==0.21.0"
#   make bench    `holdfast bench`; options with ARGS="--size 2GiB --plot bench.png"
#   make clean    remove what was built;  make distclean  removes .venv too
#
# Each of them starts from a bare checkout: it makes .venv and builds first when that is needed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
ARGS ?=
WITH ?=
PYTEST_ARGS ?=
WITH ?=

# The stamps say which step of the set-up has been done; they live and die with .venv.
ENV_STAMP := $(VENV)/.holdfast-env
BUILD_STAMP := $(VENV)/.holdfast-build

NATIVE := $(wildcard native/src/*.cpp native/src/*.hpp)
# A top-level file that comes or goes changes what the editable install has to know.
TOP := $(wildcard src/holdfast/__init__.py src/holdfast/*/__init__.py src/holdfast/*/*/__init__.py)

.PHONY: help setup build demo test compat check format bench clean distclean

help:
	@sed -n 's/^#   \(make .*\)/  \1/p' Makefile

setup: $(BUILD_STAMP)

$(ENV_STAMP): requirements-dev.txt tools/system-packages.sh tools/xxhash-headers.sh
	@PYTHON="$(PYTHON)" tools/system-packages.sh
	@test -x $(BIN)/python || { echo "setup: creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@tools/xxhash-headers.sh $(BIN)/python
	@echo "setup: installing the development requirements (torch is the large one)"
	@$(PIP) install --quiet -r requirements-dev.txt
	@touch $@

# pip says too little when all is well and too much when asked; the log has everything, the screen what matters.
define install
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --no-build-isolation --verbose $(1) > build.log 2>&1 \
	  || { (sed -n '/Configuring CMake/,$$p' build.log | grep . || cat build.log) | tail -n 60; \
	       echo "the build failed; all of its output is in build.log"; exit 1; }
	@grep -E 'warning:|-- Holdfast|io_uring backend OFF' build.log || true
	@touch $(BUILD_STAMP)
endef

$(BUILD_STAMP): $(ENV_STAMP) pyproject.toml CMakeLists.txt $(NATIVE) $(TOP)
	@echo "setup: building and installing holdfast"
	$(call install,-e '.[dev]')

# Always runs, needs no network: what one uses while working on native/.
build: $(ENV_STAMP)
	$(call install,--no-deps -e .)

demo: setup
	$(BIN)/holdfast demo $(ARGS)

test: setup
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 $(PYTEST_ARGS)

# Installed as a user does, with these or the newest dependencies, and without torch: tests that import it are skipped.
compat:
	@$(PYTHON) -m venv --clear build/compat
	@build/compat/bin/python -m pip --disable-pip-version-check --no-input install --quiet . $(WITH) \
	  pytest hypothesis pytest-timeout pytest-xdist safetensors ml_dtypes xxhash
	TESTS_WITHOUT="torch matplotlib PIL" build/compat/bin/python -m pytest -q -n auto --maxprocesses 4 -p no:cacheprovider $(PYTEST_ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

bench: setup
	$(BIN)/holdfast bench $(ARGS)

clean:
	rm -rf build dist build.log .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f $(BUILD_STAMP)
	find src tests examples tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

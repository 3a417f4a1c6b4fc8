# Everystep: everything a contributor runs.
#
#   make demo     train, kill in the middle of a save, resume, prove equality, show speed
#   make test     everything that is not opt-in: first in parallel, then the races one at a time
#   make check    ruff, mypy --strict, import-linter, clang-format
#   make format   let ruff and clang-format rewrite the files
#   make build    rebuild the native module after a change in native/ (seconds)
#   make compat   what needs no torch, on another Python: PYTHON=python3.10 WITH="numpy==1.24.0 msgspec==0.21.0"
#   make peers    build environments with DeepSpeed, transformers, ... in build/peers; run the tests that need them
#   make browser  look at the pages of `everystep view` in a real Chromium; pictures are left in build/browser
#   make cross    compile the engine's core for arm64;  make arm  runs it, too (qemu)
#   make bench    `everystep bench`; options with ARGS="--size 2GiB --plot bench.png"
#   make benchmarks  measure everything and write docs/benchmarks.md (about half an hour; ARGS="--quick" for less)
#   make study    what checkpoints cost in each framework, into build/study (hours; ARGS="--quick" for five minutes)
#   make docs     the documents as a web site, in build/site; warnings are errors
#   make dist     sdists and wheels of everystep (needs no compiler) and everystep-study, in dist/;  make dist-test  tries them
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
ENV_STAMP := $(VENV)/.everystep-env
BUILD_STAMP := $(VENV)/.everystep-build

NATIVE := $(wildcard native/src/*.cpp native/src/*.hpp)
# A top-level file that comes or goes changes what the editable install has to know.
TOP := $(wildcard src/everystep/__init__.py src/everystep/*/__init__.py src/everystep/*/*/__init__.py src/everystep/*/*/*/__init__.py)

# The engine without its Python face, and a program that tries it: built by itself for other processors and with
# sanitizers. Without liburing, which would have to be there for that processor.
CORE := $(filter-out native/src/module.cpp native/src/bind_%.cpp,$(wildcard native/src/*.cpp)) tests/engine/core.cpp
CORE_FLAGS := -std=c++20 -O2 -g -pthread -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Werror \
  -D_FILE_OFFSET_BITS=64 -DEVERYSTEP_HAVE_URING=0 -Inative/src -isystem $(VENV)/include
CROSS_CXX := aarch64-linux-gnu-g++

.PHONY: help setup build demo test compat peers browser check format cross arm bench benchmarks study docs dist dist-test clean \
  distclean

help:
	@sed -n 's/^#   \(make .*\)/  \1/p' Makefile

setup: $(BUILD_STAMP)

$(ENV_STAMP): requirements-dev.txt tools/apt.sh tools/system-packages.sh tools/xxhash-headers.sh
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
	@grep -E 'warning:|-- Everystep|io_uring backend OFF' build.log || true
	@touch $(BUILD_STAMP)
endef

$(BUILD_STAMP): $(ENV_STAMP) pyproject.toml study/pyproject.toml CMakeLists.txt $(NATIVE) $(TOP)
	@echo "setup: building and installing everystep and everystep-study"
	@$(PIP) install --quiet --no-build-isolation --no-deps -e ./study
	$(call install,-e '.[dev]')

# Always runs, needs no network: what one uses while working on native/.
build: $(ENV_STAMP)
	@$(PIP) install --quiet --no-build-isolation --no-deps -e ./study
	$(call install,--no-deps -e .)

demo: setup
	$(BIN)/python examples/demo $(ARGS)

test: setup
	$(BIN)/python tools/run_tests.py $(PYTEST_ARGS)

# Installed as a user does, with these or the newest dependencies, and without torch: tests that import it are skipped.
compat:
	@$(PYTHON) -m venv --clear build/compat
	@build/compat/bin/python -m pip --disable-pip-version-check --no-input install --quiet . ./study $(WITH) \
	  pytest hypothesis pytest-timeout pytest-xdist safetensors ml_dtypes xxhash
	TESTS_WITHOUT="torch matplotlib PIL" build/compat/bin/python -m pytest -q -n auto --maxprocesses 4 -p no:cacheprovider $(PYTEST_ARGS)

# The systems whose checkpoints we read and write, each in an environment of its own (the table is in everystep_study/environments.py).
peers: setup
	$(BIN)/python tools/peers.py
	$(BIN)/python -m pytest -q -m peers $(PYTEST_ARGS)

# Debian's browser, and what drives it; nothing of this is needed to use Everystep.
browser: setup
	@tools/cross-packages.sh chromium=chromium
	@$(PIP) install --quiet 'playwright>=1.61,<2'
	$(BIN)/python -m pytest -q -m browser $(PYTEST_ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src study/src tools/peers.py tools/planning_at_scale.py tests/support/processes/peers.py
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(NATIVE) tests/engine/core.cpp

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE) tests/engine/core.cpp

# $(1): the kind, $(2): the compiler, $(3): flags
define core
build/core-$(1)/%.o: %.cpp $(wildcard native/src/*.hpp) Makefile
	@mkdir -p $$(@D)
	@$(2) $$(CORE_FLAGS) $(3) -c -o $$@ $$<
build/core-$(1)/core: $(CORE:%.cpp=build/core-$(1)/%.o)
	@$(2) $$(CORE_FLAGS) $(3) -o $$@ $$^
endef
$(eval $(call core,arm64,$(CROSS_CXX),-static))
$(eval $(call core,address,$(CXX),-fsanitize=address -fsanitize=undefined -fno-sanitize-recover=undefined))
$(eval $(call core,thread,$(CXX),-fsanitize=thread))

cross: $(ENV_STAMP)
	@tools/cross-packages.sh $(CROSS_CXX)=g++-aarch64-linux-gnu
	@$(MAKE) --no-print-directory -j 4 build/core-arm64/core
	@if echo '#include <liburing.h>' | $(CROSS_CXX) -E -x c++ - > /dev/null 2>&1; then \
	  $(CROSS_CXX) $(CORE_FLAGS) -UEVERYSTEP_HAVE_URING -DEVERYSTEP_HAVE_URING=1 -fsyntax-only native/src/uring.cpp; fi
	@echo "the engine compiles for arm64"

arm: cross setup
	@tools/cross-packages.sh qemu-aarch64-static=qemu-user-static
	$(BIN)/python -m pytest -q -m native $(PYTEST_ARGS)

bench: setup
	$(BIN)/everystep bench $(ARGS)

study: setup
	$(BIN)/everystep study run --out build/study $(ARGS)
	$(BIN)/everystep study report build/study

benchmarks: setup
	$(BIN)/everystep bench --markdown docs/benchmarks.md $(ARGS)

# The pages are read, not imported: this needs neither torch nor a compiler.
DOCS_TOOLS := build/docs-tools
$(DOCS_TOOLS)/.stamp: requirements-docs.txt
	@$(PYTHON) -m venv --clear $(DOCS_TOOLS)
	@$(DOCS_TOOLS)/bin/python -m pip --disable-pip-version-check --no-input install --quiet -r requirements-docs.txt
	@touch $@

docs: $(DOCS_TOOLS)/.stamp
	@NO_MKDOCS_2_WARNING=1 $(DOCS_TOOLS)/bin/python -m mkdocs build --quiet --strict
	@echo "the site is in build/site; to look at it: python3 -m http.server --directory build/site"

# The wheel is built from the sdist, so that one that lacks a file fails here.
DIST_TOOLS := build/dist-tools/$(notdir $(PYTHON))
$(DIST_TOOLS)/.stamp: requirements-dist.txt tools/apt.sh tools/system-packages.sh tools/xxhash-headers.sh
	@PYTHON="$(PYTHON)" tools/system-packages.sh
	@mkdir -p $(DIST_TOOLS)
	@$(PYTHON) -m venv --clear $(DIST_TOOLS)
	@tools/xxhash-headers.sh $(DIST_TOOLS)/bin/python
	@$(DIST_TOOLS)/bin/python -m pip --disable-pip-version-check --no-input install --quiet -r requirements-dist.txt
	@touch $@

dist: $(DIST_TOOLS)/.stamp
	@rm -rf dist build/unrepaired study/build
	CMAKE_INCLUDE_PATH="$(CURDIR)/$(DIST_TOOLS)/include" $(DIST_TOOLS)/bin/python -m build --outdir build/unrepaired \
	  -Ccmake.define.EVERYSTEP_PORTABLE=ON . > build/dist.log 2>&1 || { tail -n 40 build/dist.log; exit 1; }
	PATH="$(CURDIR)/$(DIST_TOOLS)/bin:$$PATH" auditwheel repair --wheel-dir dist build/unrepaired/*.whl
	@mv build/unrepaired/*.tar.gz dist/
	$(DIST_TOOLS)/bin/python -m build --outdir dist study >> build/dist.log 2>&1 || { tail -n 40 build/dist.log; exit 1; }
	@ls -l dist

dist-test: dist
	DIST_PYTHON="$(PYTHON)" $(DIST_TOOLS)/bin/python -m pytest -q -p no:cacheprovider -m dist tests/packaging $(PYTEST_ARGS)

clean:
	rm -rf build dist study/build build.log .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f $(BUILD_STAMP)
	find src study tests examples tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

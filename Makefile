# make demo    build, install into .venv, run the main job
# make test    build, install into .venv, run the tests
# make test-staged  the tests with the GPU's handlers, on a driver that takes the host's
#               memory for a device's (tests/platforms.py)
# make test-optional  the tests and examples of bridges and executors with the packages
#               that are optional (torch, autograd, SymPy, Dask, Gymnasium, ...)
# make docs    build the site into build/site: every program of its pages and its gallery
#               runs, and a warning is an error
# make pictures  draw the pictures of docs/ from runs of the programs there
# make bench   print the table of targets, and write docs/benchmarks.md; measure the
#               sweeps, draw them in docs/pictures/, and write the tables of docs/speed.md
# make check   format, lint, types, layers, tests
# make sanitize  the native tests under ASan and TSan, and the Python ones under ASan
# make soak    ten minutes of everything at once: memory, threads and descriptors stay flat;
#               then Ctrl-C and exits at random moments
# make clients  programs of libraries that use JAX's callbacks, with and without
#               hostcall.patch_jax(): the results must be equal
# make wheel-check  one wheel under both ends of the range of jax
#
# PYTHON=python3.12  which Python makes the environment (3.11 or later)
# VENV=.venv         where
# JAX="jax==0.10.2"  which jax; empty for the newest that is supported
SHELL := /bin/bash
VENV ?= .venv
# On all cores, up to four: a process each, which compiles most of the time.
PYTEST := -m pytest -n auto --maxprocesses 4 --dist worksteal
PYTHON ?=
JAX ?=
BIN := $(VENV)/bin
NATIVE = $(wildcard native/*/*.cc native/*/*.h tests/native/*.cc)
SOURCES := pyproject.toml CMakeLists.txt README.md $(shell find native src -type f \
  \( -name '*.cc' -o -name '*.h' -o -name '*.py' -o -name '*.pth' -o -name '*.pyi' -o -name 'py.typed' \))

.PHONY: demo test test-staged test-optional docs pictures bench check format sanitize soak clients wheel-check clean

demo: $(VENV)/.installed
	$(BIN)/python -m hostcall

test: $(VENV)/.installed
	$(BIN)/python $(PYTEST)

test-staged: $(VENV)/.installed
	$(BIN)/python $(PYTEST) --platform staged

test-optional: OPTIONAL := .venv-optional
test-optional:
	scripts/venv.sh "$(PYTHON)" $(OPTIONAL)
	scripts/compiler.sh
	$(OPTIONAL)/bin/pip install --quiet --disable-pip-version-check $(JAX) \
	  ".[demo,test,torch,numba,autograd,sympy,dask,loky,cache,gymnasium]" jax-tqdm \
	  optax osqp astropy blackjax grain orbax-checkpoint tensorflow-cpu torchdata
	$(OPTIONAL)/bin/python -m pytest tests/bridge tests/runtime/test_executors.py tests/runtime/test_rows.py \
	  tests/runtime/test_dask_workers.py tests/host_function/test_host_function_cache_disk.py \
	  tests/feed/test_feed_sources.py tests/export/test_export_processes.py tests/runtime/test_where_processes.py \
	  tests/repo/test_examples.py tests/repo/test_gallery.py tests/repo/test_readme.py tests/repo/test_guide.py \
	  tests/call/test_arrays.py tests/compat/test_buffer_native.py tests/tools/test_jax_tqdm.py

docs: SITE := .venv-docs
docs:
	scripts/venv.sh "$(PYTHON)" $(SITE)
	scripts/compiler.sh
	$(SITE)/bin/pip install --quiet --disable-pip-version-check $(JAX) ".[demo,test,docs]"
	PATH="$(CURDIR)/$(SITE)/bin:$$PATH" \
	  $(SITE)/bin/python -m sphinx -W --keep-going -j 2 -b html docs build/site

pictures: $(VENV)/.installed
	$(BIN)/python scripts/pictures.py

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks --write docs/benchmarks.md --pictures docs/pictures

check: $(VENV)/.installed $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)
	$(BIN)/mypy
	$(BIN)/python scripts/typed.py
	$(BIN)/python -m pytest tests/repo/test_layers.py -q
	$(BIN)/python $(PYTEST)

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(NATIVE)

sanitize: $(VENV)/.installed
	$(MAKE) -C tests/native run
	scripts/asan.sh $(BIN)/python

soak: $(VENV)/.installed
	$(BIN)/python scripts/soak.py

clients: CLIENTS := .venv-clients
clients:
	scripts/venv.sh "$(PYTHON)" $(CLIENTS)
	scripts/compiler.sh
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check \
	  $(JAX) . -r clients/requirements.txt
	$(CLIENTS)/bin/python clients/compare.py

wheel-check:
	scripts/one_wheel.sh "$(PYTHON)"

$(VENV)/.made:
	scripts/venv.sh "$(PYTHON)" $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made $(SOURCES)
	scripts/compiler.sh
	$(BIN)/pip install --quiet --disable-pip-version-check $(JAX) ".[demo,test]"
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check \
	  "ruff>=0.9" "mypy>=1.13" "pyright[nodejs]>=1.1.414" "clang-format>=18"
	@touch $@

clean:
	rm -rf build dist .venv .venv-* .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
	$(MAKE) -C tests/native clean

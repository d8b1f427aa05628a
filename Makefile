# make demo   set up .venv if needed, then serve a small model on whatever device is there
#             DEMO_ARGS="--model DIR" serves a checkpoint; python examples/serve.py --help has the rest
# make test   set up .venv if needed, then run the tests
# make lint   pre-commit over the whole tree
#
# PYTHON=python3.12   interpreter for a new .venv
# VENV_FLAGS=--system-site-packages   reuse packages that the machine already has, torch first of all
# PYTEST_ARGS="tests/norm -x"   passed on to pytest

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
# An exact release: an open range would replace a torch that already works by the newest one. The package itself asks >= 2.10.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
DEMO_ARGS ?=

READY := $(VENV)/.ready
export PATH := $(abspath $(VENV)/bin):$(PATH)

.PHONY: demo test lint setup clean

demo: setup
	python examples/serve.py $(DEMO_ARGS)

test: setup
	python -m pytest $(PYTEST_ARGS)

lint: setup
	pre-commit run --all-files --show-diff-on-failure

setup: $(READY)

$(READY): pyproject.toml build_backend.py version.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	python -c "import torch" 2>/dev/null || python -m pip install --quiet "$(TORCH)"
	python -m pip install --quiet "setuptools>=77"
	python -m pip install --quiet --no-build-isolation -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info flashinfer/data flashinfer/_build_meta.py

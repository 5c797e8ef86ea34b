# `make` lists the targets. Variables:
#   PYTHON    the interpreter, 3.11 or newer; each has its own environment: make test PYTHON=python3.12
#   ARGS      what pytest gets: make test ARGS="tests/mesh -k grid"
#   MARK      which tests: make test MARK=slow, MARK="" for all
#   WORKERS   processes for tests, each with 8 emulated devices: make test WORKERS=4
PYTHON ?= python3
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
MARK ?= not slow
WORKERS ?= 2
ARGS ?=

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
INSTALLED := $(VENV)/.installed-$(VERSION)
NEWEST = $(shell bash .ci/find_python)

.PHONY: help install demo test lint nightly clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 12

install: $(INSTALLED)  ## the environment, made once and whenever pyproject.toml changes

demo: $(INSTALLED)  ## a small Llama, trained on 8 emulated devices
	$(VENV)/bin/python -m experiments.train_lm --recipe llama_tiny_stdlib --set mesh="data=2 fsdp=2 tensor=2"

test: $(INSTALLED)  ## the tests that are not slow
	$(VENV)/bin/python -m pytest -q -m "$(MARK)" -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(INSTALLED)  ## ruff and mypy
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

nightly: $(INSTALLED)  ## all tests, on this Python and on the newest one that is found
	$(MAKE) test MARK=""
	$(if $(NEWEST),$(MAKE) test MARK="" PYTHON=$(NEWEST),@echo "no Python 3.12 or newer found: tested on one only")

clean:  ## deletes environments and caches
	rm -rf .venv .venv-* .cache .hypothesis .pytest_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed-$(VERSION): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo \
	    "PYTHON=$(PYTHON) $(if $(VERSION),is $(VERSION),does not run here); meshpar needs 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "installing into $(VENV), once, for a minute or two"
	@test "$$($(VENV)/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$(VERSION)" \
	    || $(PYTHON) -m venv --clear $(VENV)
	@$(VENV)/bin/python -m pip install -qq -e ".[demo,test]"
	@touch $@

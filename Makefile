# Everything a developer runs. PYTHON=/path/to/python3.11 picks the interpreter .venv is made with.
.DEFAULT_GOAL := help
.PHONY: help setup check test test-slow demo parity peers clean

CANDIDATES := python3 python3.13 python3.12 python3.11 python
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in $(CANDIDATES); do \
    $$p -c '$(NEW_ENOUGH)' 2>/dev/null && { echo $$p; break; }; done)
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

help:
	@echo "make setup      .venv with purepost in it, editable, and what developing it takes"
	@echo "make check      ruff and pyright"
	@echo "make test       setup, check, then every quick test"
	@echo "make test-slow  the tests that take minutes"
	@echo "make demo       GRPO with LoRA on a small model, evaluated before and after"
	@echo "make parity     compare every family with transformers and PEFT, live, and print the table"
	@echo "make peers      compare losses and gradients with TRL's and Tunix's own functions"
	@echo "make clean      remove environments and caches; runs/ stays"

setup: .venv/.stamp

.venv/.stamp: pyproject.toml
	@$(call new_venv,.venv)
	@echo "installing purepost and its tools into .venv: a minute or two"
	.venv/bin/python $(PIP_INSTALL) --editable '.[dev]'
	@touch $@

check: setup
	.venv/bin/ruff check
	.venv/bin/basedpyright

# A process for each core, four at most: compiling is most of the work, and one core's.
test: check
	.venv/bin/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadgroup --durations 25

test-slow: setup
	.venv/bin/python -m pytest -m slow

# Huge pages, where the system has glibc: fewer misses in walking through the weights.
demo: setup
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 .venv/bin/python -m experiments.demo

# PyTorch stays out of .venv: it is only what our figures are compared with.
parity: .venv-parity/.stamp
	.venv-parity/bin/python tests/golden/make.py --check

.venv-parity/.stamp: pyproject.toml Makefile
	@$(call new_venv,.venv-parity)
	@echo "installing torch, transformers and PEFT into .venv-parity: a few minutes"
	.venv-parity/bin/python $(PIP_INSTALL) --editable '.[gguf]' torch==2.13.0 \
	    transformers==5.24.0 peft==0.21.2 trl==1.16.0 sentencepiece
	@touch $@

# Each peer in an environment of its own: what they pin does not agree.
peers: setup .venv-trl/.stamp .venv-tunix/.stamp
	mkdir -p .cache/peers
	.venv-trl/bin/python tests/golden/peers/make_trl.py .cache/peers/trl.npz
	.venv-tunix/bin/python tests/golden/peers/make_tunix.py .cache/peers/tunix.npz
	.venv/bin/python -m tests.golden.peers.table .cache/peers/trl.npz .cache/peers/tunix.npz

.venv-trl/.stamp: Makefile
	@$(call new_venv,.venv-trl)
	@echo "installing torch and TRL into .venv-trl: a few minutes"
	.venv-trl/bin/python $(PIP_INSTALL) torch==2.13.0 transformers==5.24.0 peft==0.21.2 trl==1.16.0
	@touch $@

.venv-tunix/.stamp: Makefile
	@$(call new_venv,.venv-tunix)
	@echo "installing Tunix into .venv-tunix: a few minutes"
	.venv-tunix/bin/python $(PIP_INSTALL) google-tunix==0.1.7
	@touch $@

clean:
	rm -rf .venv .venv-parity .venv-trl .venv-tunix .cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment that is there is kept; one half made is finished.
define new_venv
'$(PYTHON)' -c '$(NEW_ENOUGH)' 2>/dev/null || { \
    echo "expected Python 3.11 or newer, got '$(PYTHON)'; install one and name it:" \
         "make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }; \
test -x $(1)/bin/pip || '$(PYTHON)' -m venv $(1)
endef

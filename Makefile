# Needs Python >= 3.10 and make; everything else is installed into .venv.
#   make train                       train a GPT with Muon and FlashAttention on this machine
#   make train ARGS="--steps 200"    the same with options (make train ARGS=--help lists them)
#   make test                        lint, types and tests; with a GPU also tests/gpu
#   make docs                        build the documentation into site/; open site/index.html
#   make clean                       remove .venv and what runs have written
SYSTEM_PYTHON ?= python3
PYTHON := .venv/bin/python
ARGS ?=

# A waiting thread of torch's sleeps soon instead of spinning, or two cores that do anything else come to a crawl.
export GOMP_SPINCOUNT ?= 1000

.PHONY: train test docs clean

train: .venv/installed-examples
	@$(PYTHON) -m examples.train $(ARGS)

test: .venv/installed-dev .venv/triton-oldest
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

.venv/bin/python:
	$(SYSTEM_PYTHON) -m venv .venv

.venv/installed-%: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing torch and what $* needs into .venv (once, about a minute)"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@

# For Linux only, as Triton is.
.venv/triton-oldest: | .venv/installed-dev
	@[ "$$(uname)" != Linux ] || $(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==3.6.0

clean:
	rm -rf .venv runs site build *.egg-info

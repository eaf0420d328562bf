# One command each, on a bare checkout: every target makes the virtual environment it needs first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?= -n auto

# several test processes share the cores; numbers do not depend on it
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint types imports docs site check shown

demo: $(VENV)/.core
	$(BIN)/gradguard demo

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/mypy tests/public_api_program.py

imports: $(VENV)/.dev
	$(BIN)/lint-imports

docs: $(VENV)/.test
	$(BIN)/gradguard rules --format markdown | diff docs/rules.md - \
		|| (echo "docs/rules.md is not what the rules say; run: make docs/rules.md" && exit 1)

check: lint types imports docs

# after a change of rules or messages
docs/rules.md: $(VENV)/.test FORCE
	$(BIN)/gradguard rules --format markdown > $@

# what README, docs/ and the rules' programs show of output
shown: $(VENV)/.test
	$(BIN)/python -m tests.shown

# the documentation as a site, in build/site
site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# what `pip install gradguard` brings, and no more
$(VENV)/.core: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.core
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

FORCE:

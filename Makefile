# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-claims results tables lint types unit format lock clean

# Four real hospitals: planned from public facts, trained, certified, reported.
demo: $(VENV)/.installed
	$(BIN)/dpfl run udp --data heart --epsilon 1 --delta 1e-3 --plan --seed 1 --out runs/demo --force
	$(BIN)/dpfl certificate runs/demo --brief
	$(BIN)/dpfl report runs/demo

test: lint types unit

# The papers' claims on real data ($DPFL_DATA): about eight minutes on two cores, so not part of `make test`.
test-claims: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/claims --durations=20

# The pages of docs/results, from the finished cells beside them; nothing is trained.
results: $(VENV)/.installed
	$(BIN)/dpfl reproduce all --scale paper --out docs/results --pages

# The tables of settings and options in docs/commands.md, from the code.
tables: $(VENV)/.installed
	$(BIN)/python -c "import pathlib, dpfl.catalogue as c; c.write_tables(pathlib.Path('docs/commands.md'))"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# Every line of what a guarantee rests on is run by its tests, or nearly (tests/conftest.py watches them).
unit: $(VENV)/.installed-dev
	rm -f .coverage .coverage.*
	WATCH=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --show-missing

format: $(VENV)/.installed-dev
	$(BIN)/ruff format src tests benchmarks examples
	$(BIN)/ruff check --fix src tests benchmarks examples

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml requirements-dev.lock | $(VENV)/bin/python
	$(BIN)/pip install --quiet --requirement requirements-dev.lock
	$(BIN)/pip install --quiet --no-deps --editable .
	$(BIN)/pip check
	touch $@ $(VENV)/.installed

# The newest versions that go together. What a machine adds to a version (torch's +cpu) is that machine's choice.
lock:
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet ".[dev]"
	echo '# What `make test` runs with; written by `make lock`.' > requirements-dev.lock
	build/lock/bin/pip freeze --all --exclude pip --exclude dpfl | sed 's/+.*//' >> requirements-dev.lock

clean:
	rm -rf $(VENV) build .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Everything a developer or CI calls. `make run` and `make test` set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PACKAGES := console remote_agent db themes

.PHONY: run test check format setup dist bench bench-gpu lock clean

run: setup
	$(BIN)/glowplug demo

test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(STAMP)

$(STAMP): pyproject.toml requirements/dev.txt requirements/checkpoints.txt
	$(PYTHON) -c 'import sys; sys.exit("Glowplug needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; say make PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/checkpoints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(STAMP)

dist: setup
	$(BIN)/python deploy/build.py

bench: setup
	$(BIN)/python -m bench

# Pins what the environment holds now, for development and CI.
lock: setup
	$(BIN)/python -m pip install --quiet --upgrade -e '.[local,dev]'
	$(BIN)/python deploy/lock.py > requirements/dev.txt.new && mv requirements/dev.txt.new requirements/dev.txt

clean:
	rm -rf $(VENV) dist build

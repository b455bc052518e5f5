# Everything a developer or CI calls. Each target sets up what it needs in .venv; `make setup` alone does only that.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The first Python that is new enough, asked for only when something is to be set up.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { command -v $$python; break; }; \
	done)

.PHONY: help run test check format setup dist bench bench-gpu bench-links faults lock clean

help:
	@echo 'make run      set up, then open the console on three nodes of this machine'
	@echo 'make test     set up, then run the tests (PYTEST_ARGS="-k word" for some)'
	@echo 'make check    formatting, lint, strict types, import contracts'
	@echo 'make format   fix formatting and what lint can fix'
	@echo 'make faults   200 rounds that kill and stop processes in runs and rollouts'
	@echo 'make bench    the loader against safetensors on this CPU'
	@echo 'make bench-links    300 links to real sshds: connect, stalls, memory, storms; as root'
	@echo 'make bench-gpu OUT=FOLDER    on a GPU host: every figure of docs/performance.md'
	@echo 'make dist     both wheels and glowplug-agent.pyz, in dist/'
	@echo 'make lock     pin anew what development and CI install'
	@echo 'make clean    remove .venv and dist'

run: setup
	@$(BIN)/glowplug demo

test: setup
	@$(BIN)/python tests/run.py $(PYTEST_ARGS)

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
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo 'setup: Glowplug needs Python 3.11 or newer, and $(or $(PYTHON),no python3) is not;' \
		'install one, or say make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@$(PYTHON) deploy/make_venv.py $(VENV)

dist: setup
	@$(BIN)/python deploy/build.py

bench: setup
	@$(BIN)/python -m bench $(BENCH_ARGS)

ROUNDS ?= 200

faults: setup
	@$(BIN)/python -m tests.faults --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED)) $(if $(OUT),--out "$(OUT)")

bench-links: setup
	@$(BIN)/python -m tests.faults.many_links $(BENCH_ARGS) $(if $(OUT),--out "$(OUT)")

# The host's own Python, which has a torch for its GPU; .venv has one for CPUs.
GPU_PYTHON ?= python3
SCRATCH ?= /tmp
MODEL ?= $(SCRATCH)/llama-7b
BUDGET_S ?= 1500

bench-gpu:
	@test -n "$(OUT)" || { echo 'bench-gpu: say OUT=FOLDER for the results' >&2; exit 2; }
	@$(GPU_PYTHON) -m bench gpu --model "$(MODEL)" --out "$(OUT)" --scratch "$(SCRATCH)" --budget-s $(BUDGET_S) $(BENCH_ARGS)

lock: setup
	$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager -e '.[local,dev]'
	$(BIN)/python deploy/lock.py > requirements/dev.txt.new && mv requirements/dev.txt.new requirements/dev.txt

clean:
	rm -rf $(VENV) dist

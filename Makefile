# `make demo` and `make test` each do all the set-up they need; a second run does none.
VENV := .venv
RUN := $(VENV)/bin/python -m
WORKERS ?= 2
# Threads that spin while they wait take the cores from those that work, wherever processes outnumber cores.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help demo test lint format clean setup-demo setup-dev

help:
	@echo "make demo    fine-tune a small quantised mixture-of-experts model, from nothing, on the CPU"
	@echo "make test    lint, then every test"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff mend what it can"
	@echo "make clean   remove the environment and everything built"
	@echo "TORCH_INDEX_URL=... picks another build of torch (see pytorch.org/get-started)"

demo: setup-demo
	$(RUN) torch_nvfp4 demo

test: lint
	$(RUN) pytest -n $(WORKERS) --dist worksteal

lint: setup-dev
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: setup-dev
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup-demo setup-dev: setup-%:
	@sh scripts/setup.sh $(VENV) $*

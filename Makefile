# Everything runs from a fresh clone with only Python and make: each target sets up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Ranks are processes: one thread each, or they fight for the cores.
export OMP_NUM_THREADS := 1
# Tests start many processes, and each would compile every file that it imports.
unexport PYTHONDONTWRITEBYTECODE
# An announcement that mkdocs-material prints at each build.
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo test test-quick test-long test-gpu check docs bench format clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest

test-quick: $(READY)
	$(BIN)/python -m pytest -m quick

test-long: $(READY)
	$(BIN)/python -m pytest -n 0 -m long --timeout 1800

test-gpu: $(READY)
	$(BIN)/python -m pytest -n 0 -m gpu

check: $(READY)
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/house_rules.py
	$(BIN)/mkdocs build --strict --quiet

# The site, in build/site; what is generated is written first.
docs: $(READY)
	$(BIN)/python docs/hooks.py
	$(BIN)/mkdocs build --strict

bench: $(READY)
	$(BIN)/python bench/cube.py
	$(BIN)/python bench/pipeline.py
	$(BIN)/python bench/weave.py
	$(BIN)/python bench/tensor3d.py
	$(BIN)/python bench/train.py
	$(BIN)/python bench/between.py
	$(BIN)/python bench/plan.py
	$(BIN)/python -m bench.emulated

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	# For the zoo alone, where nothing else finds them: PyPI's torchvision cannot be imported beside a torch for CPUs.
	$(BIN)/pip install --quiet --no-deps --upgrade --constraint constraints.txt --target $(VENV)/vision timm torchvision
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

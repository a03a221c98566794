# make demo and make test work on a machine with nothing but Python and gcc: both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint types package links check setup clean

# torch first and by its exact version: what else is installed then finds it there. On Linux, PyPI's wheel may be a CUDA
# build of several GB; for a small CPU build run `make TORCH="torch==2.13.0 --index-url URL" setup` with the wheel index
# that pytorch.org names for CPU.
TORCH ?= torch==2.13.0

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,plot,video,wandb]'
	touch $(READY)

setup: $(READY)

demo: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/dlm-decode demo

test: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

package: $(READY)
	$(BIN)/python tests/check_package.py

# As git checks out on Windows by default: without the links inside dlm_decode/.
links: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/python tests/check_links.py

check: lint types package links test

clean:
	rm -rf $(VENV) build dist *.egg-info

# Each target makes its own virtual environment (.venv) first; nothing needs doing before.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench conformance notebook clean

demo: $(VENV)/.installed-demo
	$(BIN)/python -m benchmarks.demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.latency

conformance: $(VENV)/.installed-dev
	$(BIN)/python -m tests.conformance.run --all
	$(BIN)/python -m tests.conformance.tensor_core --count 240

notebook: $(VENV)/.installed-notebook
	$(BIN)/jupyter-execute notebooks/*.ipynb

# Installed editable, so that the sources are what runs; the stamp renews when dependencies change.
$(VENV)/.installed-%: pyproject.toml setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info

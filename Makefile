# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h)
TORCH := torch==2.13.0

.PHONY: demo test build lint format kernel-test test-neon sanitize fuzz clean

demo: build
	$(BIN)/hotset run --temp 0 -n 64 smollm2-135m "Why is the sky blue? Answer in one sentence."

build: $(STAMP)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Build requirements first: the package itself is then built in place, so that a change of csrc/ is a quick rebuild.
$(STAMP): pyproject.toml CMakeLists.txt $(SOURCES) | $(VENV)/bin/python
	$(BIN)/python -m pip install -q "scikit-build-core>=0.11" "nanobind>=2.4" "ninja" "cmake>=3.25"
	$(BIN)/python -m pip install -q --no-build-isolation -e .
	touch $@

$(VENV)/.dev: $(STAMP)
	$(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[dev]"
	touch $@

test: $(VENV)/.dev lint kernel-test
	$(BIN)/python -m pytest -n 2

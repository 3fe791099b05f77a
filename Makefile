# SPDX-License-Identifier: Apache-2.0
# Every target does its own set-up: `make serve` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
MODEL  ?= benchmarks/demo/model
HEADS  ?=
ARGS   ?=
JOBS   ?= 2
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-done

# Tests that keep to a core each, JOBS at a time, and then those that take them all; either may have none of $(ARGS).
PYTEST := $(BIN)/python -m pytest
NONE   := 5

.PHONY: setup serve test test-full quality format clean bytes

setup: $(STAMP)

$(STAMP): pyproject.toml .ci/install.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python .ci/install.py
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	mkdir -p typing/vllm_ppd
	for part in kernels heads model_patches vllm_plugins; do ln -sfn ../../$$part typing/vllm_ppd/$$part; done
	touch $(STAMP)

# make serve PORT=8001 MODEL=/models/llama ARGS="--spec-tokens 2 --ppd-exit-layer 8"
# make serve HEADS=early     with the demo model's heads of that kind; or HEADS=/path/to/heads
serve: DRAFTS = $(if $(HEADS),$(firstword $(wildcard benchmarks/demo/heads/$(HEADS)) $(HEADS)),ppd)
serve: setup
	. .ci/serve-env.sh && $(BIN)/vllm serve $(MODEL) --port $(PORT) --speculative-model $(DRAFTS) $(ARGS)

test: KIND = not full and
test test-full: setup
	@failed=0; \
	$(PYTEST) -n $(JOBS) --dist loadfile -m "$(KIND) not ranks" $(ARGS) || test $$? -eq $(NONE) || failed=1; \
	$(PYTEST) -m "$(KIND) ranks" $(ARGS) || test $$? -eq $(NONE) || failed=1; \
	exit $$failed

quality: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The demo model of bytes, its heads and peers, all inflated: what speeds are measured on (benchmarks/demo/README.md).
BYTES     := build/bytes
TRAINING  := --model $(BYTES)/model --data build/corpus/train.jsonl
CALIBRATE := $(BIN)/ppd calibrate --data build/corpus/validation.jsonl --prompt-tokens 192
KINDS     := early cp dynamo
bytes: setup
	$(BIN)/python benchmarks/demo/corpus.py --out build/corpus
	$(BIN)/python benchmarks/demo/train.py --vocabulary 257 --out $(BYTES)/model
	$(BIN)/ppd train early --steps 120 --num-speculative-tokens 4 $(TRAINING) --out $(BYTES)/heads/early
	$(BIN)/ppd train cp --rank 3 --positions 5 --num-speculative-tokens 4 --steps 120 $(TRAINING) --out $(BYTES)/heads/cp
	$(BIN)/ppd train dynamo --steps 120 --mask-entries 100000 $(TRAINING) --out $(BYTES)/heads/dynamo
	for kind in $(KINDS); do $(CALIBRATE) $(BYTES)/heads/$$kind || exit 1; done
	$(BIN)/python benchmarks/peers/eagle.py --steps 480 --model $(BYTES)/model --out $(BYTES)/peers/eagle
	$(BIN)/python benchmarks/peers/medusa.py --heads 4 --steps 480 --model $(BYTES)/model --out $(BYTES)/peers/medusa
	$(BIN)/python benchmarks/inflate.py --model $(BYTES)/model --parameters 450M --out $(BYTES)/inflated \
		--heads $(KINDS:%=$(BYTES)/heads/%)
	$(BIN)/python benchmarks/peers/inflate_peers.py --peers $(BYTES)/peers/eagle $(BYTES)/peers/medusa \
		--model $(BYTES)/inflated/model --out $(BYTES)/inflated/peers
	for kind in $(KINDS); do $(CALIBRATE) $(BYTES)/inflated/heads/$$kind || exit 1; done

clean:
	rm -rf $(VENV) typing build *.egg-info .pytest_cache .ruff_cache .mypy_cache

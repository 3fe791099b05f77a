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

.PHONY: setup serve test test-full quality format clean inflated bytes

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

# The demo model, its heads and peers at the cost of larger ones: what speeds are measured on (benchmarks/demo/README.md).
# A step whose last file is there is not done again, so that what was stopped goes on.
BUILD     := build
CORPUS    := $(BUILD)/corpus
KINDS     := early cp dynamo
DEMO      := benchmarks/demo
SMALLER   := $(BUILD)/inflated100
LARGER    := $(BUILD)/inflated
OTHERS    := eagle medusa draft_model
INFLATE   := benchmarks/inflate.py --model $(DEMO)/model --heads $(KINDS:%=$(DEMO)/heads/%)
ENDS_IN   := heads/$(lastword $(KINDS))/provenance.json
STEPS_eagle       := --steps 480
STEPS_medusa      := --heads 4 --steps 480
STEPS_draft_model := --steps 240

GROWN     := $(KINDS:%=$(LARGER)/heads/%/.calibrated)

inflated: $(CORPUS)/validation.jsonl $(SMALLER)/$(ENDS_IN) $(OTHERS:%=$(LARGER)/peers/%/config.json) $(GROWN)

$(SMALLER)/$(ENDS_IN): | setup
	$(BIN)/python $(INFLATE) --parameters 100M --out $(SMALLER)

$(LARGER)/$(ENDS_IN): | setup
	$(BIN)/python $(INFLATE) --parameters 300M --out $(LARGER)

$(GROWN): %/.calibrated: | $(LARGER)/$(ENDS_IN) $(CORPUS)/validation.jsonl
	$(BIN)/ppd calibrate $(@D) --data $(CORPUS)/validation.jsonl
	touch $@

$(OTHERS:%=$(BUILD)/peers/%/provenance.json): $(BUILD)/peers/%/provenance.json: | setup
	$(BIN)/python benchmarks/peers/$*.py $(STEPS_$*) --out $(@D)

$(OTHERS:%=$(LARGER)/peers/%/config.json): $(LARGER)/peers/%/config.json: | $(BUILD)/peers/%/provenance.json $(LARGER)/$(ENDS_IN)
	$(BIN)/python benchmarks/peers/inflate_peers.py --peers $(BUILD)/peers/$* --model $(LARGER)/model --out $(LARGER)/peers

# A second demo model, of bytes, with all of its own: as sure of what comes next as a large model is.
BYTES     := $(BUILD)/bytes
PEERS     := eagle medusa
INFLATED  := $(BYTES)/inflated
MODEL_IS  := $(BYTES)/model/provenance.json
LARGE_IS  := $(INFLATED)/heads/$(lastword $(KINDS))/provenance.json
SMALL     := $(KINDS:%=$(BYTES)/heads/%/.calibrated)
LARGE     := $(KINDS:%=$(INFLATED)/heads/%/.calibrated)
OF_early  := --steps 120 --num-speculative-tokens 4
OF_cp     := --rank 3 --positions 5 --num-speculative-tokens 4 --steps 120
OF_dynamo := --steps 120 --mask-entries 100000
OF_eagle  := --steps 480
OF_medusa := --heads 4 --steps 480

bytes: $(SMALL) $(PEERS:%=$(INFLATED)/peers/%/config.json) $(LARGE)

$(CORPUS)/validation.jsonl: | setup
	$(BIN)/python benchmarks/demo/corpus.py --out $(CORPUS)

$(MODEL_IS): | $(CORPUS)/validation.jsonl
	$(BIN)/python benchmarks/demo/train.py --vocabulary 257 --out $(@D)

$(KINDS:%=$(BYTES)/heads/%/provenance.json): $(BYTES)/heads/%/provenance.json: | $(MODEL_IS)
	$(BIN)/ppd train $* $(OF_$*) --model $(BYTES)/model --data $(CORPUS)/train.jsonl --out $(@D)

$(SMALL) $(LARGE): %/.calibrated: | %/provenance.json
	$(BIN)/ppd calibrate $(@D) --data $(CORPUS)/validation.jsonl --prompt-tokens 192
	touch $@

$(PEERS:%=$(BYTES)/peers/%/provenance.json): $(BYTES)/peers/%/provenance.json: | $(MODEL_IS)
	$(BIN)/python benchmarks/peers/$*.py $(OF_$*) --model $(BYTES)/model --out $(@D)

$(LARGE_IS): | $(SMALL)
	$(BIN)/python benchmarks/inflate.py --model $(BYTES)/model --parameters 450M --out $(INFLATED) \
		--heads $(KINDS:%=$(BYTES)/heads/%)

$(filter-out $(LARGE_IS),$(KINDS:%=$(INFLATED)/heads/%/provenance.json)): | $(LARGE_IS) ;

$(PEERS:%=$(INFLATED)/peers/%/config.json): $(INFLATED)/peers/%/config.json: | $(BYTES)/peers/%/provenance.json $(LARGE_IS)
	$(BIN)/python benchmarks/peers/inflate_peers.py --peers $(BYTES)/peers/$* --model $(INFLATED)/model --out $(INFLATED)/peers

clean:
	rm -rf $(VENV) typing build *.egg-info .pytest_cache .ruff_cache .mypy_cache

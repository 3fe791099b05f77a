# The models and heads that speeds are measured on: `make -f benchmarks/models/models.mk inflated`, and the
# papers' ways of training beside each other: `recipes TARGET=MODEL DATA=FILE`, each with its figures in its folder.
# A command whose result is there is not run again, so a stopped make goes on where it was. See benchmarks/demo/README.md.

PYTHON ?= python
OUT    ?= build
DEMO   := benchmarks/demo
KINDS  := early cp dynamo
MODELS := $(PYTHON) -m vllm_ppd.benchmarks.models
PPD    := $(PYTHON) -m vllm_ppd.vllm_plugins.cli.main
CORPUS := $(OUT)/corpus/validation.jsonl
TRAIN  := $(OUT)/corpus/train.jsonl

# The papers' recipes, over the defaults of `ppd train`: heads, losses, sizes, and base models that learn, too.
RECIPE_transform-kl  := early --optimizer adamw --learning-rate 5e-3
RECIPE_classifier-ce := early --head classifier
DYNAMO               := dynamo --mask-rank 0 --distillation 0
RECIPE_t2            := $(DYNAMO) --num-speculative-tokens 1
RECIPE_t3            := $(DYNAMO) --num-speculative-tokens 2
RECIPE_t4            := $(DYNAMO) --num-speculative-tokens 3
RECIPE_t3-distilled  := $(RECIPE_t3) --distillation 1
RECIPE_t3-random     := $(RECIPE_t3) --start random
# DynaMo, A.1: three rates; and the base model as plain training moves it, as Pythia+ of Table 10: its heads follow it.
RECIPE_t3-full       := $(RECIPE_t3-random) --recipe full --dtype float32
RECIPE_t3-continued  := $(RECIPE_t3-full) --stem-learning-rate 0
# CP, section 3.1: the base model learns with the head, from its weights on or from scratch.
JOINT   := cp --recipe full --start identity --condition none --distillation 0 --dtype float32
SCRATCH := $(JOINT) --base-start random --base-learning-rate 3e-3
RANKS   := 1 3 5 8
BALANCE := 0 0.01 1 10
$(foreach r,$(RANKS),$(eval RECIPE_cp-joint-$(r) := $(JOINT) --rank $(r)))
$(foreach r,$(RANKS),$(eval RECIPE_cp-joint-$(r)-whole := $(JOINT) --rank $(r) --no-factorized))
$(foreach r,$(RANKS),$(eval RECIPE_cp-scratch-$(r) := $(SCRATCH) --rank $(r)))
$(foreach r,$(RANKS),$(eval RECIPE_cp-scratch-$(r)-whole := $(SCRATCH) --rank $(r) --no-factorized))
$(foreach b,$(BALANCE),$(eval RECIPE_cp-scratch-8-balance-$(b) := $(SCRATCH) --rank 8 --balance $(b)))
RECIPES := $(patsubst RECIPE_%,%,$(filter RECIPE_%,$(.VARIABLES)))
TARGET  ?= $(DEMO)/model
DATA    ?= $(TRAIN)

.PHONY: inflated recipes
.SECONDARY:

# The demo model at a larger model's cost.
inflated: $(KINDS:%=$(OUT)/inflated/heads/%/.calibrated)
recipes: $(RECIPES:%=$(OUT)/recipes/%/provenance.json)

$(CORPUS):
	$(MODELS) corpus --out $(@D)

$(OUT)/recipes/%/provenance.json: | $(CORPUS)
	$(PPD) train $(RECIPE_$*) $(ARGS) --model $(TARGET) --data $(DATA) --out $(@D)

$(OUT)/inflated/.inflated:
	$(MODELS) inflate --model $(DEMO)/model --times 9 --out $(@D) --heads $(KINDS:%=$(DEMO)/heads/%)
	touch $@

$(OUT)/inflated/heads/%/.calibrated: | $(OUT)/inflated/.inflated $(CORPUS)
	$(PPD) calibrate $(@D) --data $(CORPUS)
	touch $@

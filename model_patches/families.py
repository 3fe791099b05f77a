# SPDX-License-Identifier: Apache-2.0
"""Families that can be cut, and their adapters. Imports no model code, so that it can
refuse before a model loads.
"""

LLAMA_LIKE = "vllm_ppd.model_patches.adapters.LlamaLikeAdapter"
GRANITE = "vllm_ppd.model_patches.adapters.GraniteAdapter"
TRANSFORMERS = "vllm_ppd.model_patches.adapters.TransformersAdapter"

# Architecture name (as in the model's config.json) -> adapter.
FAMILIES: dict[str, str] = {
    "LlamaForCausalLM": LLAMA_LIKE,
    "MistralForCausalLM": LLAMA_LIKE,
    "MixtralForCausalLM": LLAMA_LIKE,
    "Qwen2ForCausalLM": LLAMA_LIKE,
    "Qwen3ForCausalLM": LLAMA_LIKE,
    "Qwen3MoeForCausalLM": LLAMA_LIKE,
    "Gemma3ForCausalLM": LLAMA_LIKE,
    "Phi3ForCausalLM": LLAMA_LIKE,
    "Glm4ForCausalLM": LLAMA_LIKE,
    "Llama4ForCausalLM": LLAMA_LIKE,
    "GptOssForCausalLM": LLAMA_LIKE,
    "GraniteForCausalLM": GRANITE,
    "GPTNeoXForCausalLM": TRANSFORMERS,
    "Olmo2ForCausalLM": TRANSFORMERS,
    "Olmo3ForCausalLM": TRANSFORMERS,
    "SmolLM3ForCausalLM": TRANSFORMERS,
}

# Multimodal models whose language model is one of these families.
MULTIMODAL = (
    "Gemma3ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
)


# Families to which further layers (DynaMo's) have not been added yet.
NO_TOKEN_HEADS: tuple[str, ...] = (
    "MixtralForCausalLM",
    "GraniteForCausalLM",
    "Llama4ForCausalLM",
    "GptOssForCausalLM",
)


def adapter_path(architectures: list[str] | None) -> str:
    """The dotted path of the adapter for a model; for a multimodal model, of its
    language model's family.

    Raises:
        ValueError: if the family cannot be cut; the message names it and lists those
            that can.
    """
    for name in architectures or []:
        if name in FAMILIES:
            return FAMILIES[name]
        if name in MULTIMODAL:
            return LLAMA_LIKE
    unknown = ", ".join(architectures or ["(no architecture)"])
    known = ", ".join(name.removesuffix("ForCausalLM") for name in FAMILIES)
    instead = f"supported families: {known}; or use CP heads without --layers"
    raise ValueError(
        f"model family {unknown} cannot be cut at a layer; {instead}"
    )

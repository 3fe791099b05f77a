# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family, made on the spot: what exactness is tested on."""

from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LAYERS = 6
VOCAB = 320
HEAD_DIM = 32  # the smallest that vLLM's CPU attention knows
END = "<|end|>"

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    # Large enough that every layer changes what would be said.
    "initializer_range": 0.12,
}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"hidden_size": 128},
    "qwen3": {},
    "qwen3_moe": _MOE,
    # Sliding and full layers: two KV cache groups, each with its own block table.
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 48,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": HEAD_DIM,
    },
    "phi3": {"hidden_size": 128},
    "gpt_neox": {"hidden_size": 128, "num_key_value_heads": 4, "rotary_pct": 1.0},
    "mixtral": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "glm4": {},
    # Every multiplier that the decoder's forward applies.
    "granite": {
        "hidden_size": 128,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
    },
    "olmo2": {"hidden_size": 128},
    "olmo3": {"hidden_size": 128, "sliding_window": 48},
    "smollm3": {"hidden_size": 128},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 48,
    },
    "llama4": {
        "model_type": "llama4_text",
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
    },
}


def make_tokenizer() -> tf.PreTrainedTokenizerFast:
    """One token a byte, so that any text, grammar and stop string can be written."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {END: 0} | {char: i + 1 for i, char in enumerate(alphabet)}
    vocab |= {f"<extra_{i}>": i for i in range(len(vocab), VOCAB)}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        bos_token=END,
        pad_token=END,
    )


def config_of(family: str, **changes: object) -> Any:
    """The configuration of a family's model."""
    sizes = {"model_type": family, **_COMMON, **FAMILIES[family], **changes}
    return tf.AutoConfig.for_model(**sizes)


def architecture(family: str) -> Any:
    """transformers' class of a family."""
    return tf.AutoModelForCausalLM._model_mapping[type(config_of(family))]


def make_model(
    folder: Path,
    family: str = "llama",
    seed: int = 0,
    **changes: object,
) -> Path:
    """Write a random float32 model with a tokenizer; returns its folder."""
    torch.manual_seed(seed)
    return save(architecture(family)(config_of(family, **changes)), folder)


def save(model: Any, folder: Path) -> Path:
    """Write a model with a tokenizer; returns its folder."""
    model.eval().save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_biased(folder: Path) -> Path:
    """A Phi in bfloat16 whose LM head has a bias of about the size of its logits."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 4}
    model = tf.PhiForCausalLM(config_of("llama", model_type="phi", **sizes))
    model.lm_head.bias.data.normal_()
    return save(model.bfloat16(), folder)

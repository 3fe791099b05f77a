# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family, made on the spot: what exactness is tested on."""

from pathlib import Path

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

FAMILIES = {
    "llama": (tf.LlamaConfig, tf.LlamaForCausalLM, {}),
    "mistral": (tf.MistralConfig, tf.MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM, {"hidden_size": 128}),
    "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM, {}),
    "qwen3_moe": (tf.Qwen3MoeConfig, tf.Qwen3MoeForCausalLM, _MOE),
    # Sliding and full layers: two KV cache groups, each with its own block table.
    "gemma3": (
        tf.Gemma3TextConfig,
        tf.Gemma3ForCausalLM,
        {
            "sliding_window": 48,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": HEAD_DIM,
        },
    ),
    "phi3": (tf.Phi3Config, tf.Phi3ForCausalLM, {"hidden_size": 128}),
    "gpt_neox": (
        tf.GPTNeoXConfig,
        tf.GPTNeoXForCausalLM,
        {"hidden_size": 128, "num_key_value_heads": 4, "rotary_pct": 1.0},
    ),
    "mixtral": (
        tf.MixtralConfig,
        tf.MixtralForCausalLM,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "glm4": (tf.Glm4Config, tf.Glm4ForCausalLM, {}),
    # Every multiplier that the decoder's forward applies.
    "granite": (
        tf.GraniteConfig,
        tf.GraniteForCausalLM,
        {
            "hidden_size": 128,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
        },
    ),
    "olmo2": (tf.Olmo2Config, tf.Olmo2ForCausalLM, {"hidden_size": 128}),
    "olmo3": (
        tf.Olmo3Config,
        tf.Olmo3ForCausalLM,
        {"hidden_size": 128, "sliding_window": 48},
    ),
    "smollm3": (tf.SmolLM3Config, tf.SmolLM3ForCausalLM, {"hidden_size": 128}),
    "gpt_oss": (
        tf.GptOssConfig,
        tf.GptOssForCausalLM,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 48},
    ),
    "llama4": (
        tf.Llama4TextConfig,
        tf.Llama4ForCausalLM,
        {
            "num_local_experts": 4,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
        },
    ),
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
        tokenizer_object=bpe, eos_token=END, bos_token=END, pad_token=END
    )


def make_model(
    folder: Path, family: str = "llama", seed: int = 0, **changes: object
) -> Path:
    """Write a random float32 model with a tokenizer; returns its folder."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**_COMMON, **extra, **changes})).eval()
    model.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder

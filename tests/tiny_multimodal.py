# SPDX-License-Identifier: Apache-2.0
"""Tiny multimodal models around tiny text models.

Qwen2-Audio's language model says what the text model says. vLLM's image models need
torchvision, of which there is no build beside a CPU torch, so they are served without
images.
"""

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import tiny
import torch
import transformers as tf
from safetensors.torch import save_file

TEXT = "qwen2"  # the family of its language model
# AUDIO: in whose place embeddings come
AUDIO = tiny.VOCAB - 1
_BEGIN = tiny.VOCAB - 2
_END = tiny.VOCAB - 3
_RATE = 16000
_MELS = 16
_ENCODER = {
    "num_mel_bins": _MELS,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "max_source_positions": 1500,  # half a minute, as vLLM expects
}


def make(folder: Path, text_model: Path) -> Path:
    """Write Qwen2-Audio around a tiny Qwen2."""
    text = tf.AutoModelForCausalLM.from_pretrained(
        text_model, dtype=torch.float32
    )
    torch.manual_seed(3)
    config = tf.Qwen2AudioConfig(
        audio_config=tf.Qwen2AudioEncoderConfig(**_ENCODER),
        text_config=text.config,
        audio_token_index=AUDIO,
    )
    model = tf.Qwen2AudioForConditionalGeneration(config).eval()
    for (
        name,
        weight,
    ) in model.named_parameters():  # sounds must change what is said
        if (
            weight.dim() > 1
            and "language_model" not in name
            and "lm_head" not in name
        ):
            torch.nn.init.normal_(weight, std=0.5)
    # The names of published checkpoints, which vLLM knows.
    tensors = {
        f"language_model.{name}": weight
        for name, weight in text.state_dict().items()
    }
    for name, weight in model.state_dict().items():
        for part in ("audio_tower", "multi_modal_projector"):
            _, found, rest = name.rpartition(part)
            if found:
                tensors[part + rest] = weight
    save_file(tensors, folder / "model.safetensors")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tokenizer = tiny.make_tokenizer()
    names = {
        "audio_token": AUDIO,
        "audio_bos_token": _BEGIN,
        "audio_eos_token": _END,
    }
    tokens = {
        name: tokenizer.convert_ids_to_tokens(number)
        for name, number in names.items()
    }
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(tokens.values())}
    )
    extractor = tf.WhisperFeatureExtractor(
        feature_size=_MELS, sampling_rate=_RATE
    )
    tf.Qwen2AudioProcessor(extractor, tokenizer, **tokens).save_pretrained(folder)
    return folder


# Families with a vision tower, and those of their text models
IMAGES = {"gemma3": "gemma3", "mistral3": "mistral", "qwen2_5_vl": "qwen2"}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "image_size": 28,
    "patch_size": 14,
    # Qwen's names
    "num_heads": 2,
    "depth": 1,
    "out_hidden_size": 128,
    "fullatt_block_indexes": [0],
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}


def with_images(folder: Path, family: str) -> Path:
    """Write a random model of two text layers and a vision tower."""
    torch.manual_seed(4)
    text = tiny.config_of(IMAGES[family], num_hidden_layers=2).to_dict()
    if family == "qwen2_5_vl":
        sections = {"mrope_section": [4, 6, 6]}
        text |= {
            "model_type": f"{family}_text",
            "rope_parameters": _ROPE | sections,
        }
    config = tf.AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=dict(_TOWER),
        image_token_id=AUDIO,
        video_token_id=_BEGIN,
        vision_start_token_id=_END,
        mm_tokens_per_image=4,
    )
    return tiny.save(tf.AutoModelForMultimodalLM.from_config(config), folder)


def register(architecture: str) -> None:
    """Import vLLM's class of an image model with an empty torchvision, which text alone
    does not need.
    """
    from vllm import ModelRegistry

    name = "torchvision"
    for part in ("", ".transforms", ".v2", ".functional"):
        name += part
        sys.modules[name] = ModuleType(name)
    cls = ModelRegistry.models[architecture].load_model_cls()
    for module in [
        name for name in sys.modules if name.startswith("torchvision")
    ]:
        del sys.modules[module]
    ModelRegistry.register_model(architecture, cls)


def sound(seed: int) -> tuple[np.ndarray, int]:
    """Half a second of tones that rise and fall, and its sampling rate."""
    time = np.arange(_RATE // 2) / _RATE
    loudness, pitch = np.random.default_rng(seed).random((2, 4, 1))
    angles = 2 * np.pi * (300 + 3000 * pitch) * time * (1 + time)
    return (loudness * np.sin(angles)).sum(axis=0).astype(np.float32), _RATE

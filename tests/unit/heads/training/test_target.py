# SPDX-License-Identifier: Apache-2.0
"""The target: packed documents are computed as each is alone, and heads learn its own
logits.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_multimodal
import torch
import transformers as tf
from conftest import Factory
from torch.nn import functional

from vllm_ppd.heads.dynamo.config import DynaMoOptions
from vllm_ppd.heads.dynamo.recipe import DynaMoRecipe
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.target import fingerprint
from vllm_ppd.heads.training import target as targets
from vllm_ppd.heads.training.packed_attention import (
    NAME,
    PackedAttention,
    packed_attention,
)
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt_neox", "gpt_oss", "llama4", "olmo2"]
)
def test_packed_documents_do_not_see_each_other(
    tiny_model: Factory, family: str
) -> None:
    target = Target(str(tiny_model(family)), torch.device("cpu"), torch.float32)
    torch.manual_seed(0)
    ids = torch.randint(1, 200, (1, 60))
    lengths = [7, 40, 13]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = target.run(Batch(ids, positions), exits=(2, 5))
    start = 0
    for length in lengths:
        window = slice(start, start + length)
        alone = target.run(
            Batch(ids[:, window], torch.arange(length)[None]), exits=(2, 5)
        )
        torch.testing.assert_close(
            packed.final[window], alone.final, atol=1e-4, rtol=1e-4
        )
        torch.testing.assert_close(
            packed.exits[2][window], alone.exits[2], atol=1e-4, rtol=1e-4
        )
        start += length


def made(family: str, **changes: Any) -> Any:
    """A tiny model of two layers."""
    config = tiny.config_of(
        family,
        num_hidden_layers=2,
        **changes,
    )
    return tf.AutoModelForCausalLM.from_config(config)


# What is computed of a product with the LM head: (scale, cap)
LOGITS: dict[str, tuple[dict[str, Any], float, float | None]] = {
    "granite": ({"logits_scaling": 3.0}, 1 / 3, None),
    "cohere": ({"model_type": "cohere", "logit_scale": 0.25}, 0.25, None),
    "gemma2": (
        {"model_type": "gemma2", "final_logit_softcapping": 4.0},
        1.0,
        4.0,
    ),
    # Masks packed documents only by masks that it is given
    "opt": ({"model_type": "opt", "word_embed_proj_dim": 64}, 1.0, None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOGITS)
def test_logits_are_the_models_own(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """Scaled or capped ones are measured; likeliest tokens have their probabilities."""
    changes, scale, cap = LOGITS[name]
    family = {"granite": "granite", "gemma2": "gemma3"}.get(name, "llama")
    tiny.save(made(family, **changes), tmp_path)
    target = Target(str(tmp_path), torch.device("cpu"), dtype)
    assert (target.scale, target.cap) == (pytest.approx(scale, rel=1e-3), cap)
    ids = torch.arange(10, 40)[None]
    states = target.run(Batch(ids, torch.arange(30)[None]), top_k=3)
    with torch.no_grad():
        logits = target.model(ids).logits[0].float()
    near = {"atol": 1e-4, "rtol": 1e-4}
    if dtype == torch.bfloat16:
        near = {"atol": 0.05, "rtol": 0.02}
    torch.testing.assert_close(
        target.logits(states.final),
        logits,
        **near,
    )
    assert states.top_ids is not None
    best = logits.log_softmax(-1).gather(1, states.top_ids)
    torch.testing.assert_close(
        states.top_log_probs,
        best,
        **near,
    )


def test_other_logits_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those whose cap has a name that is not known."""
    tiny.save(made("gemma3", **LOGITS["gemma2"][0]), tmp_path)
    monkeypatch.setattr(targets, "CAP_NAMES", ())
    with pytest.raises(TrainingError, match=r"its logits differ by .*%"):
        Target(str(tmp_path), torch.device("cpu"), torch.float32)


def test_documents_that_see_each_other_are_refused(tmp_path: Path) -> None:
    """Bloom masks no documents and takes no masks of them."""
    sizes = {
        "vocab_size": tiny.VOCAB,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 4,
    }
    config = tf.BloomConfig(**sizes, initializer_range=0.12)
    tiny.save(tf.BloomForCausalLM(config), tmp_path)
    with pytest.raises(
        TrainingError, match="packed into a window see each other"
    ):
        Target(str(tmp_path), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("family", tiny_multimodal.IMAGES)
def test_text_models_of_multimodal_models(tmp_path: Path, family: str) -> None:
    tiny_multimodal.with_images(tmp_path, family)
    target = Target(str(tmp_path), torch.device("cpu"), torch.float32)
    assert fingerprint(tmp_path).lm_head is not None
    assert not target.passes_masks


def by_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any,
    scale: float,
) -> torch.Tensor:
    """What xformers computes, [1, tokens, heads, size] each, on any device."""
    length = query.shape[1]
    output = functional.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),
        attn_mask=attn_bias.materialize((length, length)),
        scale=scale,
    )
    return output.transpose(1, 2)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_mask_of_xformers_gives_the_same_loss_and_gradients(
    tiny_model: Factory, family: str
) -> None:
    """Also of the heads' own layers, and where layers see a window of the document."""
    pytest.importorskip("xformers.ops", reason="xformers is optional")
    model = tiny_model(family)
    target = Target(str(model), torch.device("cpu"), torch.float32)
    options = DynaMoOptions(
        model=str(model),
        data=("-",),
        out="-",
    )
    torch.manual_seed(0)
    ids = torch.randint(1, 200, (2, 90))
    positions = torch.cat([torch.arange(size) for size in (70, 20, 5, 85)])
    batch = Batch(ids, positions.view(2, 90))
    results = []
    for packed in (None, PackedAttention()):
        if packed is not None:
            packed.attend = by_mask
            target.packed = packed
            target.model.set_attn_implementation(NAME)
        recipe = DynaMoRecipe(options, target)
        loss, _ = recipe.loss(batch)
        gradients = torch.autograd.grad(loss, list(recipe.parameters()))
        results.append((loss.detach(), *gradients))
    torch.testing.assert_close(
        *results,
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="xformers may be used on a GPU"
)
def test_xformers_is_for_gpus(tiny_model: Factory) -> None:
    target = Target(str(tiny_model()), torch.device("cpu"), torch.float32)
    assert packed_attention(target) is None

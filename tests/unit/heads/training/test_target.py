# SPDX-License-Identifier: Apache-2.0
"""States of the target: packed documents are computed as each is alone."""

from typing import Any

import pytest
import torch
from conftest import Factory
from torch.nn import functional

from vllm_ppd.heads.dynamo.config import DynaMoOptions
from vllm_ppd.heads.dynamo.recipe import DynaMoRecipe
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
    options = DynaMoOptions(model=str(model), data=("-",), out="-")
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
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="xformers may be used on a GPU"
)
def test_xformers_is_for_gpus(tiny_model: Factory) -> None:
    target = Target(str(tiny_model()), torch.device("cpu"), torch.float32)
    assert packed_attention(target) is None

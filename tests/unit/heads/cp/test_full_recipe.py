# SPDX-License-Identifier: Apache-2.0
"""CP heads trained together with their base model (CP, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from vllm_ppd.heads.cp.config import CPOptions
from vllm_ppd.heads.cp.recipe import CPRecipe
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch
from vllm_ppd.kernels.cp_mixture import balance_loss

GIVEN: dict[str, Any] = {"data": ("-",), "out": "-", "rank": 2, "positions": 3, "num_speculative_tokens": 2}


def recipe_of(model: Path, **options: Any) -> CPRecipe:
    given = {**GIVEN, "model": str(model), "recipe": "full", "condition": "none", "distillation": 0.0, **options}
    return CPRecipe(CPOptions(**given), Target(str(model), torch.device("cpu"), torch.float32, trainable=True))


@pytest.mark.parametrize("factorised", [True, False])
def test_loss_is_the_formula(tiny_model: Callable[..., Path], factorised: bool) -> None:
    """Next token by the LM head, eq. 9 with the LM head a constant, eq. 10; and the gradients of head and base."""
    recipe = recipe_of(tiny_model(), factorised=factorised)
    target, head = recipe.target, recipe.head
    ids = torch.randint(2, 250, (2, 20), generator=torch.Generator().manual_seed(3))
    batch = Batch(ids, torch.arange(20).expand(2, -1))
    loss, counts = recipe.loss(batch)
    loss.backward()
    found = {name: p.grad.clone() for name, p in recipe.named_parameters() if p.grad is not None}
    recipe.zero_grad()

    final = target.model.base_model(input_ids=ids).last_hidden_state[:, :-3].flatten(0, 1)
    text = torch.stack([ids[:, s : 20 - 3 + s] for s in (1, 2, 3)], dim=-1).flatten(0, 1)
    own = functional.cross_entropy(target.model.get_output_embeddings()(final), text[:, 0])
    weights = head.log_weights(final)
    factors = head.log_factors(final, None if not factorised else target.unembedding.detach())
    seen = factors.gather(-1, text[:, :, None, None].expand(-1, -1, 2, 1)).squeeze(-1)
    joint = -torch.logsumexp(weights + seen.sum(1), dim=-1).mean()
    expected = own + joint + 0.1 * balance_loss(weights)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(counts["next_token"], own.detach() * len(text))
    expected.backward()
    assert set(found) == {name for name, p in recipe.named_parameters() if p.grad is not None}
    for name, parameter in recipe.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)
    alone = recipe_of(tiny_model(), recipe="heads").loss(batch)[1]
    assert "next_token" not in alone


def test_from_scratch(tiny_model: Callable[..., Path]) -> None:
    """A random base model is the same for a seed, and nothing of the given one but its shape."""
    weights = []
    for seed in (5, 5, 6):
        recipe = recipe_of(tiny_model(), base_start="random", start="identity", seed=seed)
        weights.append(dict(recipe.target.model.state_dict()))
    given = recipe_of(tiny_model()).target.model.state_dict()
    for name in (name for name in given if name.endswith("proj.weight")):
        assert torch.equal(weights[0][name], weights[1][name])
        assert not torch.equal(weights[0][name], weights[2][name])
        assert not torch.equal(weights[0][name], given[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_start": "random"}, "add --recipe full --start identity"),
        ({"base_start": "random", "recipe": "full"}, "add --recipe full --start identity"),
        ({"train_vocab_size": 64, "recipe": "full"}, "omit --train-vocab-size"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CPOptions(**{**GIVEN, "model": "m", **options})

# SPDX-License-Identifier: Apache-2.0
"""DynaMo's heads learn the target's own distribution at the token that they draft."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Factory
from overfitted import untrained

from vllm_ppd.heads.cp.module import normed
from vllm_ppd.heads.dynamo.recipe import DynaMoRecipe
from vllm_ppd.heads.training.tokens import Batch


def recipe_of(model: Path, **options: Any) -> DynaMoRecipe:
    return untrained(model, "dynamo", **options)


def two_documents(length: int = 24) -> Batch:
    """A window of a whole document, and one of two, of which the second counts from its
    fourth token on.
    """
    ids = torch.randint(
        2,
        250,
        (2, length),
        generator=torch.Generator().manual_seed(3),
    )
    positions = torch.stack(
        [
            torch.arange(length),
            torch.cat([torch.arange(10), torch.arange(length - 10)]),
        ]
    )
    counted = torch.ones(
        2,
        length,
        dtype=torch.bool,
    )
    counted[1, 10:13] = False
    return Batch(ids, positions, counted=counted)


@pytest.mark.parametrize(("distillation", "rank"), [(0.0, 0), (0.3, 4), (1.0, 4)])
def test_loss_is_the_formula(
    tiny_model: Factory, distillation: float, rank: int
) -> None:
    """Head i at t: cross-entropy to the target's top-k at t + i - 1 and the text's
    token t + i, given the tokens before by the learned mask, and its gradient.
    """
    recipe = recipe_of(
        tiny_model(),
        distillation=distillation,
        distillation_top_k=5,
        mask_rank=rank,
        train_vocab_size=200 if rank else 0,
    )
    batch = two_documents()
    target = recipe.target
    ids = torch.arange(target.vocab_size)
    if rank:
        ids = torch.arange(7, 207)
        recipe.use_vocabulary(ids)
        generator = torch.Generator().manual_seed(1)
        for parameter in recipe.mask.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.05 * noise
    parameters = list(recipe.parameters())
    loss, counts = recipe.loss(batch)
    gradients = torch.autograd.grad(loss, parameters)

    states = target.run(batch, stem=True)
    assert states.stem is not None and batch.counted is not None
    log_p = torch.log_softmax(
        states.final.view(2, 24, -1) @ target.unembedding.T, -1
    )
    expected = torch.zeros(())
    for i in (2, 3):
        hidden = target.norm(recipe.heads(i, *states.stem))
        if rank:
            text = batch.input_ids
            weights = recipe.mask.weights
            read = [normed(target.embed(text.roll(-s, 1))) for s in (1, i - 1)]
            hidden = hidden + read[0] @ weights["newest"][i - 2].T
            if i > 2:
                thin = read[1] @ weights["before"][i - 3].T
                hidden = hidden + thin @ weights["after"][i - 3]
        log_q = torch.zeros(2, 24, target.vocab_size)
        log_q[..., ids] = (hidden @ target.unembedding[ids].T).log_softmax(-1)
        of_text = []
        of_target = []
        for t in range(24 - i):
            places = batch.position_ids[:, [t, t + i]].diff().squeeze(1)
            rows = (places == i) & batch.counted[:, t + 1 : t + i + 1].all(1)
            q = log_q[rows, t]
            best = log_p[rows, t + i - 1].topk(5)
            of_text.append(-q.gather(1, batch.input_ids[rows, t + i, None]))
            shares = best.values.exp() * q.gather(1, best.indices)
            of_target.append(-shares.sum(1))
        text = torch.cat(of_text)
        teacher = torch.cat(of_target)
        expected = (
            expected
            + (1 - distillation) * text.mean()
            + distillation * teacher.mean()
        )
        assert int(counts[f"rows.{i}"]) == len(text)
        torch.testing.assert_close(counts[f"nll.{i}"], text.sum().detach())
        if distillation:
            torch.testing.assert_close(
                counts[f"distilled.{i}"], teacher.sum().detach()
            )
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(
        gradients, torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(
            ours,
            theirs,
            rtol=1e-3,
            atol=1e-6,
        )


def test_the_full_recipe_is_taught_by_the_model_that_it_trains(
    tiny_model: Factory,
) -> None:
    """The teacher is the base model of the moment, which learns nothing from being made."""
    gradients = []
    for distillation in (1.0, 0.0):
        recipe = recipe_of(
            tiny_model(),
            recipe="full",
            stem_learning_rate=0.0,
            distillation=distillation,
        )
        recipe.loss(two_documents())[0].backward()
        assert recipe.base is not None
        gradients.append([p.grad for p in recipe.base.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("optimizer", "times"), [("muon", 5), ("adamw", 1)])
def test_matrices_learn_faster_with_muon(
    tiny_model: Factory, optimizer: str, times: int
) -> None:
    recipe = recipe_of(tiny_model(), optimizer=optimizer)
    rates = {
        parameter.dim(): group["peak"]
        for group in recipe.groups(1.0)
        for parameter in group["params"]
    }
    assert rates == {1: 1.0, 2: times, 3: times}

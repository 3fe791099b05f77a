# SPDX-License-Identifier: Apache-2.0
"""CP heads in training: the losses, the first transforms, what a condition costs, and
the full recipe (section 3.1).
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Factory
from torch.nn import functional

from vllm_ppd.heads.base import TargetLayers
from vllm_ppd.heads.cp.config import Condition, CPConfig, CPOptions, CPParts
from vllm_ppd.heads.cp.module import CPHead
from vllm_ppd.heads.cp.recipe import CPRecipe, ridge_start
from vllm_ppd.heads.draft_vocabulary import most_frequent
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch
from vllm_ppd.kernels.cp_mixture import balance_loss

POSITIONS = 4
SIZE = 6
GIVEN: dict[str, Any] = {
    "data": ("-",),
    "out": "-",
    "rank": 2,
    "positions": POSITIONS,
    "stored_dtype": "float32",
}
FULL: dict[str, Any] = {
    "recipe": "full",
    "condition": "none",
    "distillation": 0.0,
    "positions": 3,
    "num_speculative_tokens": 2,
}


def seeded(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_cost_of_a_condition() -> None:
    """Three drafts of rank 2: transforms, matrices that read tokens, and reads of the LM head."""
    target = TargetLayers(
        model_type="llama", hidden_size=SIZE, vocab_size=64, num_hidden_layers=2
    )
    counts = [{"drafted": 9.0, "cycles": 9.0, "length": 1.5}] * 3
    timing = {
        "seconds": {"layer": {1: 1.0}, "lm_head": {1: 1.0}},
        "lm_head_share": 0.1,
        "transform_in_layers": 1.0,
    }
    acceptance = {name: {"by_drafts": counts} for name in ("greedy", "T 0.8")}
    parts = CPParts.model_validate({"timing": timing, "acceptance": acceptance})
    costs = {}
    for condition in ("none", "recurrent"):
        config = CPConfig(
            verifier="m",
            positions=4,
            rank=2,
            condition=condition,
            num_speculative_tokens=3,
            target=target,
            inner_size=2 * SIZE,
            expert_rank=SIZE,
        )
        three = list(config.settings(parts, greedy=True))[2]
        costs[condition] = (three.layers, three.reads, three.rows)
    # A draft: V, the gated layer, and two matrices an expert
    recurrent = (
        3 * (2 + 5 * 2 + 2 * 2),
        3,
        2,
    )
    assert costs == {"none": (8, 1, 8), "recurrent": recurrent}


def test_ridge_finds_a_linear_model() -> None:
    """The first transforms are the matrices that made the target's states from the one
    that the head reads.
    """
    head = CPHead(SIZE, POSITIONS, 2)
    noise = CPHead(SIZE, POSITIONS, 2).transforms
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(POSITIONS, SIZE, SIZE, generator=generator)
    made[0] = torch.eye(SIZE)
    hidden = torch.randn(400, SIZE, generator=generator)
    states = torch.stack([hidden @ matrix.T for matrix in made], dim=1)
    unread = torch.zeros(400, POSITIONS - 1, SIZE)
    ridge_start(head, [(states[:250], unread[:250]), (states[250:], unread[250:])])
    assert head.transforms is not None and noise is not None
    for expert in range(2):
        start = head.transforms[:, expert] - (noise[:, expert] - torch.eye(SIZE))
        torch.testing.assert_close(start, made, rtol=0.02, atol=0.02)


def recipe_of(model: Path, **options: Any) -> CPRecipe:
    made = CPOptions(**{**GIVEN, "model": str(model), **options})
    full = made.recipe == "full"
    return CPRecipe(
        made, Target(str(model), torch.device("cpu"), torch.float32, trainable=full)
    )


def windows(count: int = 3, length: int = 40) -> Batch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 250, (count, length), generator=generator)
    return Batch(ids, torch.arange(length).expand(count, -1))


@pytest.mark.parametrize(
    ("condition", "layers"), [("none", ()), ("recurrent", ()), ("recurrent", (1, 4))]
)
@pytest.mark.parametrize("vocabulary", [0, 120])
def test_loss_is_the_formula(
    tiny_model: Factory, condition: Condition, layers: tuple[int, ...], vocabulary: int
) -> None:
    """Cross-entropy to the target's top-k at each position, the text's likelihood and
    the balance; and its gradient.

    Held out, a draft is accepted where it and those before it are the target's own
    choice.
    """
    recipe = recipe_of(
        tiny_model(),
        condition=condition,
        distillation=0.7,
        distillation_top_k=5,
        train_vocab_size=vocabulary,
        layers=layers,
    )
    for seed, parameter in enumerate(recipe.parameters()):
        parameter.data += seeded(*parameter.shape, seed=seed, scale=0.05)
    batch = windows()
    target = recipe.target
    head = recipe.head
    vocabulary_ids = torch.arange(target.vocab_size)
    if vocabulary:
        counts = torch.bincount(batch.input_ids.flatten(), minlength=target.vocab_size)
        vocabulary_ids = most_frequent(counts, vocabulary)
        recipe.use_vocabulary(vocabulary_ids)
    loss, figures = recipe.loss(batch)
    loss.backward()
    gradients = [
        parameter.grad.clone()
        for parameter in recipe.parameters()
        if parameter.grad is not None
    ]
    assert len(gradients) == len(list(recipe.parameters()))
    recipe.zero_grad()
    assert "accepted" not in figures
    recipe.eval()
    accepted = recipe.loss(batch)[1]["accepted"].tolist()

    place = {int(token): index for index, token in enumerate(vocabulary_ids)}
    states = target.run(batch, layers)
    final = states.final.view(3, 40, -1)
    read = head.read(states).view(3, 40, -1)
    log_p = functional.log_softmax(final @ target.unembedding.T, -1)
    total: torch.Tensor = torch.zeros(())
    nll = torch.zeros(())
    gates = []
    right = torch.zeros(3, dtype=torch.int64)
    for row, t in itertools.product(range(3), range(40 - 4)):
        text = batch.input_ids[row, t + 1 : t + 5]
        context = target.embed(text[None, :-1])
        factors = head.logits(
            read[row, t][None], target.unembedding[vocabulary_ids], None, context
        )[0].log_softmax(-1)
        weights = head.log_weights(read[row, t][None], context)[0]
        gates.append(weights)
        alive = True
        for index, s in enumerate(range(1 + head.lead, 5)):
            mixed = torch.logsumexp(weights[:, None] + factors[index], 0)
            best = log_p[row, t + s - 1].topk(5)
            if s > 1:
                alive = alive and bool(
                    vocabulary_ids[mixed.argmax()] == best.indices[0]
                )
                right[s - 2] += alive
            for value, token in zip(
                best.values.tolist(), best.indices.tolist(), strict=True
            ):
                if token in place:
                    total = (
                        total
                        - 0.8**index
                        * 0.7
                        * torch.tensor(value).exp()
                        * mixed[place[token]]
                    )
            if (token := int(text[s - 1])) in place:
                nll = nll - mixed[place[token]]
                weights = torch.log_softmax(
                    weights + factors[index, :, place[token]], 0
                )
    expected = (total + 0.3 * nll) / (3 * 36) + 0.1 * balance_loss(torch.stack(gates))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert accepted == right.tolist()
    torch.testing.assert_close(figures["joint"], nll.detach(), rtol=1e-4, atol=1e-4)
    expected.backward()
    for gradient, parameter in zip(gradients, recipe.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-5)


def test_a_share_of_the_positions(tiny_model: Factory) -> None:
    """Drawn anew in each epoch while training; the evaluation reads all."""
    recipe = recipe_of(tiny_model(), position_share=0.25)
    batch = windows()
    _, valid = batch.ahead(4)
    chosen = [recipe.train().share_of(valid, 0.25) for _ in range(2)]
    assert not torch.equal(*chosen)
    assert all(
        len(rows) == round(0.25 * int(valid.sum())) and valid[rows].all()
        for rows in chosen
    )
    assert int(recipe.loss(batch)[1]["rows"]) == len(chosen[0])
    assert int(recipe.eval().loss(batch)[1]["rows"]) == int(valid.sum())


@pytest.mark.parametrize(("condition", "slow"), [("none", 0), ("recurrent", 1)])
def test_ridge_starts_below_the_identity(
    tiny_model: Factory, condition: Condition, slow: int
) -> None:
    """Nearer to the target's distributions than its own LM head is, before the first step."""
    losses = {}
    for start in ("identity", "ridge"):
        recipe = recipe_of(tiny_model(), condition=condition, start=start)

        def some() -> Iterator[Batch]:
            yield windows(12, 120)

        recipe.start_from(some())
        losses[start] = float(recipe.loss(windows(4, 120))[1]["distilled"])
        rates = [group["peak"] for group in recipe.groups(1e-3)]
        # The tiny model's embeddings are about an eighth of its normed states.
        assert rates[:2] == [1e-3, 1e-3] and rates[2:] == pytest.approx(
            [8e-3] * slow, rel=0.2
        )
    assert losses["ridge"] < losses["identity"]


@pytest.mark.parametrize("factorised", [True, False])
def test_the_loss_of_the_full_recipe_is_the_formula(
    tiny_model: Factory, factorised: bool
) -> None:
    """Next token by the LM head, eq. 9 with the LM head a constant, eq. 10; and the
    gradients of head and base.
    """
    recipe = recipe_of(tiny_model(), **FULL, factorised=factorised)
    target = recipe.target
    head = recipe.head
    ids = torch.randint(2, 250, (2, 20), generator=torch.Generator().manual_seed(3))
    batch = Batch(ids, torch.arange(20).expand(2, -1))
    loss, counts = recipe.loss(batch)
    loss.backward()
    gradients = {
        name: p.grad.clone()
        for name, p in recipe.named_parameters()
        if p.grad is not None
    }
    recipe.zero_grad()

    final = (
        target.model.base_model(input_ids=ids).last_hidden_state[:, :-3].flatten(0, 1)
    )
    text = torch.stack([ids[:, s : 20 - 3 + s] for s in (1, 2, 3)], dim=-1).flatten(
        0, 1
    )
    next_token = functional.cross_entropy(
        target.model.get_output_embeddings()(final), text[:, 0]
    )
    weights = head.log_weights(final)
    factors = head.log_factors(
        final, None if not factorised else target.unembedding.detach()
    )
    seen = factors.gather(-1, text[:, :, None, None].expand(-1, -1, 2, 1)).squeeze(-1)
    joint = -torch.logsumexp(weights + seen.sum(1), dim=-1).mean()
    expected = next_token + joint + 0.1 * balance_loss(weights)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(counts["next_token"], next_token.detach() * len(text))
    expected.backward()
    assert set(gradients) == {
        name for name, p in recipe.named_parameters() if p.grad is not None
    }
    for name, parameter in recipe.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(
                gradients[name], parameter.grad, rtol=1e-3, atol=1e-6
            )
    alone = recipe_of(tiny_model(), **{**FULL, "recipe": "heads"}).loss(batch)[1]
    assert "next_token" not in alone


def test_from_scratch(tiny_model: Factory) -> None:
    """A random base model is the same for a seed, and nothing of the given one but its shape."""
    weights = []
    for seed in (5, 5, 6):
        recipe = recipe_of(
            tiny_model(), **FULL, base_start="random", start="identity", seed=seed
        )
        weights.append(dict(recipe.target.model.state_dict()))
    given = recipe_of(tiny_model(), **FULL).target.model.state_dict()
    for name in (name for name in given if name.endswith("proj.weight")):
        assert torch.equal(weights[0][name], weights[1][name])
        assert not torch.equal(weights[0][name], weights[2][name])
        assert not torch.equal(weights[0][name], given[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_start": "random"}, "add --recipe full --start identity"),
        (
            {"base_start": "random", "recipe": "full"},
            "add --recipe full --start identity",
        ),
        ({"train_vocab_size": 64, "recipe": "full"}, "omit --train-vocab-size"),
        (
            {"factorised": False},
            "condition 'recurrent' needs factorised heads; use 'none'",
        ),
        (
            {"condition": "chain"},
            "no longer served; train new heads with --condition recurrent",
        ),
        (
            {"num_speculative_tokens": 4},
            "num_speculative_tokens=4 needs 5 positions, not 4",
        ),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CPOptions(**{**GIVEN, "model": "m", **options})

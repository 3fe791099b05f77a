# SPDX-License-Identifier: Apache-2.0
"""CP heads in training: the losses, the first transforms, what a condition costs, and
the full recipe (section 3.1).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Factory
from heads_folders import cp_head
from overfitted import untrained
from torch.nn import functional

from vllm_ppd.heads.cp.config import Condition, CPOptions
from vllm_ppd.heads.cp.recipe import CPRecipe
from vllm_ppd.heads.module import most_frequent
from vllm_ppd.heads.training.ridge import Ridge
from vllm_ppd.heads.training.tokens import Batch
from vllm_ppd.kernels.cp_mixture import balance_loss

POSITIONS = 4
SIZE = 6
SIZES: dict[str, Any] = {"rank": 2}
FULL: dict[str, Any] = {
    "recipe": "full",
    "condition": "none",
    "distillation": 0.0,
    "num_speculative_tokens": 2,
}


@pytest.mark.parametrize(
    ("form", "cost"),
    [
        # Three drafts of rank 2: transforms, and one read of the LM head
        ({"condition": "none"}, (8, 1)),
        ({"condition": "none", "factorized": False}, (0, 8)),
        # Three matrices for the layers; a draft: V, the gated layer, two an expert
        ({"layers": (1, 2)}, (3 + 3 * (2 + 5 * 2 + 2 * 2), 3)),
    ],
)
def test_cost_of_a_condition(
    form: dict[str, Any], cost: tuple[float, float]
) -> None:
    given = {"condition": "recurrent", "expert_rank": SIZE} | form
    head = cp_head(
        SIZE,
        8,
        positions=4,
        rank=2,
        **given,
    )
    assert head.config.work(3) == cost


def test_ridge_finds_a_linear_model() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(
        2 * SIZE,
        5,
        generator=generator,
    )
    inputs = torch.randn(
        400,
        2 * SIZE,
        generator=generator,
    )
    outputs = inputs @ matrix
    fit = Ridge(SIZE)
    for rows in torch.arange(400).split(250):
        fit.add(inputs[rows], outputs[rows])
    solution, scale = fit.solve()
    torch.testing.assert_close(
        solution.float(),
        matrix,
        rtol=0.02,
        atol=0.02,
    )
    assert scale == pytest.approx(float(outputs.square().mean() ** 0.5), rel=0.01)


def recipe_of(model: Path, **options: Any) -> CPRecipe:
    return untrained(model, "cp", **{**SIZES, **options})


def windows(count: int = 3, length: int = 40) -> Batch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(
        2,
        250,
        (count, length),
        generator=generator,
    )
    return Batch(ids, torch.arange(length).expand(count, -1))


def assert_same_gradients(
    recipe: CPRecipe, loss: torch.Tensor, expected: torch.Tensor, tolerance: float
) -> None:
    """Of all parameters, some of which neither may read."""
    parameters = list(recipe.parameters())
    ours, theirs = (
        torch.autograd.grad(of, parameters, allow_unused=True)
        for of in (loss, expected)
    )
    assert any(gradient is not None for gradient in ours)
    torch.testing.assert_close(
        ours,
        theirs,
        rtol=1e-3,
        atol=tolerance,
    )


@pytest.mark.parametrize(
    ("condition", "layers"),
    [("none", ()), ("recurrent", ()), ("recurrent", (1, 4))],
)
@pytest.mark.parametrize("vocabulary", [0, 120])
def test_loss_is_the_formula(
    tiny_model: Factory,
    condition: Condition,
    layers: tuple[int, ...],
    vocabulary: int,
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
    generator = torch.Generator().manual_seed(1)
    for parameter in recipe.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    batch = windows()
    target = recipe.target
    head = recipe.head
    ids = torch.arange(target.vocab_size)
    if vocabulary:
        counts = torch.bincount(
            batch.input_ids.flatten(), minlength=target.vocab_size
        )
        ids = most_frequent(counts, vocabulary)
        recipe.use_vocabulary(ids)
    loss, figures = recipe.loss(batch)
    assert "accepted" not in figures
    recipe.eval()
    accepted = recipe.loss(batch)[1]["accepted"].tolist()

    states = target.run(batch, layers)
    log_p = (
        (states.final @ target.unembedding.T)
        .log_softmax(-1)
        .view(
            3,
            40,
            -1,
        )
    )
    # Two tokens at least follow a row, and four if the window has them.
    hidden = head.read(states).view(3, 40, -1)[:, :38].flatten(0, 1)
    padded = functional.pad(batch.input_ids, (0, 2))
    text = padded.unfold(1, 5, 1)[..., 1:].flatten(0, 1)
    places = torch.arange(38)
    rows = torch.arange(3 * 38)
    context = target.embed(text[:, :-1])
    logits = head.logits(
        hidden,
        target.unembedding[ids],
        None,
        context,
    )
    weights = gates = head.log_weights(hidden, context)
    total = torch.zeros(())
    nll = torch.zeros(())
    right = []
    alive = torch.ones(len(rows), dtype=torch.bool)
    for factor, s in enumerate(range(1 + head.lead, 5)):
        factors = logits[:, factor].log_softmax(-1)
        mixed = torch.logsumexp(weights[..., None] + factors, dim=1)
        known = (places + s < 40).repeat(3)
        there = (places + s - 1).clamp(max=39)
        best = log_p[:, there].flatten(0, 1).topk(5)
        teacher = torch.zeros(len(rows), target.vocab_size)
        teacher[rows[:, None], best.indices] = best.values.exp()
        shares = (teacher[:, ids] * mixed).sum(1)
        total = total - 0.7 * 0.8**factor * shares[known].sum()
        if s > 1:
            alive = alive & known & (ids[mixed.argmax(1)] == best.indices[:, 0])
            right.append(int(alive.sum()))
        is_text = text[:, s - 1, None] == ids
        seen, place = (is_text & known[:, None]).nonzero().unbind(1)
        nll = nll - mixed[seen, place].sum()
        moved = torch.log_softmax(
            weights[seen] + factors[seen, :, place],
            dim=-1,
        )
        weights = weights.index_copy(0, seen, moved)
    expected = (total + 0.3 * nll) / len(rows) + 0.1 * balance_loss(gates)
    torch.testing.assert_close(
        loss,
        expected,
        rtol=1e-4,
        atol=1e-5,
    )
    torch.testing.assert_close(
        figures["joint"],
        nll.detach(),
        rtol=1e-4,
        atol=1e-4,
    )
    assert accepted == right
    assert_same_gradients(
        recipe,
        loss,
        expected,
        1e-5,
    )


def test_a_share_of_the_positions(tiny_model: Factory) -> None:
    """Drawn anew in each epoch while training; the evaluation reads all."""
    recipe = recipe_of(tiny_model(), position_share=0.25)
    batch = windows()
    first, counts = recipe.loss(batch)
    second, _ = recipe.loss(batch)
    assert first != second
    assert int(counts["rows"]) == round(3 * 38 / 4)
    assert int(recipe.eval().loss(batch)[1]["rows"]) == 3 * 38


@pytest.mark.parametrize(("condition", "slow"), [("none", 0), ("recurrent", 1)])
def test_ridge_starts_below_the_identity(
    tiny_model: Factory, condition: Condition, slow: int
) -> None:
    """Nearer to the target's distributions than its own LM head is, before the first step."""
    losses = {}
    for start in ("identity", "ridge"):
        recipe = recipe_of(
            tiny_model(),
            condition=condition,
            start=start,
        )
        recipe.start_from(iter([windows(12, 120)]))
        losses[start] = float(recipe.loss(windows(4, 120))[1]["distilled"])
        rates = [group["peak"] for group in recipe.groups(1e-3)]
        # The tiny model's embeddings are about an eighth of its normed states.
        assert rates[:2] == [1e-3, 1e-3]
        assert rates[2:] == pytest.approx([8e-3] * slow, rel=0.2)
    assert losses["ridge"] < losses["identity"]


@pytest.mark.parametrize("factorized", [True, False])
def test_the_loss_of_the_full_recipe_is_the_formula(
    tiny_model: Factory, factorized: bool
) -> None:
    """Next token by the LM head, eq. 9 with the LM head a constant, eq. 10; and the
    gradients of head and base.
    """
    recipe = recipe_of(tiny_model(), **FULL, factorized=factorized)
    target = recipe.target
    head = recipe.head
    batch = windows(2, 20)
    ids = batch.input_ids
    loss, counts = recipe.loss(batch)

    states = target.model.base_model(input_ids=ids).last_hidden_state
    final = states[:, :-2].flatten(0, 1)
    padded = functional.pad(ids, (0, 1))
    text = padded.unfold(1, 4, 1)[..., 1:].flatten(0, 1)
    lm_head = target.model.get_output_embeddings()
    every = lm_head(states[:, :-1]).flatten(0, 1)
    next_token = functional.cross_entropy(every, ids[:, 1:].flatten())
    weights = head.log_weights(final)
    factors = head.logits(final, target.unembedding.detach()).log_softmax(-1)
    index = text[:, :, None, None].expand(-1, -1, 2, 1)
    seen = factors.gather(-1, index).squeeze(-1)
    seen[17::18, 2] = 0  # a window's last row has two tokens after it
    joint = -torch.logsumexp(weights + seen.sum(1), dim=-1).mean()
    expected = next_token + joint + 0.1 * balance_loss(weights)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        counts["next_token"], next_token.detach() * len(text)
    )
    assert_same_gradients(
        recipe,
        loss,
        expected,
        1e-6,
    )


def test_from_scratch(tiny_model: Factory) -> None:
    """A random base model is the same for a seed, and nothing of the given one but its shape."""
    given = recipe_of(tiny_model(), **FULL).target.unembedding
    scratch = FULL | {"base_start": "random", "start": "identity"}
    first, same, other = (
        recipe_of(tiny_model(), **scratch, seed=seed).target.unembedding
        for seed in (5, 5, 6)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other) and not torch.equal(first, given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"base_start": "random", "recipe": "full"},
            "add --recipe full --start identity",
        ),
        ({"train_vocab_size": 64, "recipe": "full"}, "omit --train-vocab-size"),
        ({"factorized": False}, "needs factorized heads; use 'none'"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CPOptions(
            model="m",
            data=("d",),
            out="o",
            **SIZES,
            **options,
        )

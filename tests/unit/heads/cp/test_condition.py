# SPDX-License-Identifier: Apache-2.0
"""CP heads that read the newest token, or the draft before: formulas, drafts, first transforms, and what is learnt."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from heads_folders import log_likelihood
from pydantic import ValidationError
from scipy.stats import chisquare
from torch.nn import functional

from vllm_ppd.heads.base import TargetLayers
from vllm_ppd.heads.cp.config import Condition, CPConfig, CPOptions, CPParts
from vllm_ppd.heads.cp.module import CPHead
from vllm_ppd.heads.cp.recipe import CPRecipe, ridge_start
from vllm_ppd.heads.draft_vocabulary import most_frequent
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch
from vllm_ppd.kernels.cp_mixture import balance_loss
from vllm_ppd.kernels.sampling import Sampling

ROWS, POSITIONS, RANK, VOCAB, SIZE = 3, 4, 2, 5, 6
F64 = torch.float64
CONDITIONS = pytest.mark.parametrize("condition", ["none", "token", "chain"])
READING = pytest.mark.parametrize("condition", ["token", "chain"])


def seeded(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64) * scale


def head_of(condition: Condition, positions: int = POSITIONS) -> tuple[CPHead, torch.Tensor, torch.Tensor]:
    """A head far from its start, an unembedding and the embeddings that it reads."""
    head = CPHead(SIZE, positions, RANK, dtype=F64, condition=condition)
    for seed, parameter in enumerate(head.parameters()):
        parameter.data.copy_(seeded(*parameter.shape, seed=seed, scale=0.6))
    return head, seeded(VOCAB, SIZE, seed=20), seeded(VOCAB, SIZE, seed=21)


@torch.no_grad()
def slow_conditional(
    head: CPHead, hidden: torch.Tensor, unembedding: torch.Tensor, embeddings: torch.Tensor, before: tuple[int, ...]
) -> torch.Tensor:
    """P(x_s | e, b, x_2..x_{s-1}) of one row [vocabulary], one factor at a time; `before` starts with b."""
    assert head.transforms is not None and head.token is not None and head.token_gate is not None
    read = embeddings[before[0]]
    weights = (head.gate @ hidden + head.token_gate @ read).softmax(0)
    for s in range(len(before)):
        factors = []
        for expert in range(head.rank):
            state = head.transforms[s, expert] @ hidden + head.token[s] @ read
            if head.previous is not None and s:
                state = state + head.previous[s - 1] @ embeddings[before[s]]
            factors.append((unembedding @ state).softmax(0))
        mixed = torch.stack(factors)
        if s + 1 == len(before):
            return (weights[:, None] * mixed).sum(0)
        weights = weights * mixed[:, before[s + 1]]
        weights = weights / weights.sum()
    raise AssertionError


@READING
def test_conditionals_are_the_formula(condition: Condition) -> None:
    """Teacher-forced likelihoods, and greedy drafts, position by position."""
    head, unembedding, embeddings = head_of(condition)
    hidden = seeded(ROWS, SIZE, seed=5)
    tokens = torch.randint(VOCAB, (ROWS, POSITIONS), generator=torch.Generator().manual_seed(6))
    joint, chain = log_likelihood(head, hidden, tokens[:, 1:], unembedding, None, embeddings[tokens[:, :-1]])
    torch.testing.assert_close(joint, chain.sum(1))
    drafts, probs = head.draft(hidden, tokens[:, 0], unembedding, embeddings=embeddings)
    for row in range(ROWS):
        text: tuple[int, ...] = tuple(tokens[row].tolist())
        drafted: tuple[int, ...] = text[:1]
        for s in range(POSITIONS - 1):
            expected = slow_conditional(head, hidden[row], unembedding, embeddings, text[: s + 1])
            torch.testing.assert_close(chain[row, s].exp(), expected[text[s + 1]])
            expected = slow_conditional(head, hidden[row], unembedding, embeddings, drafted)
            torch.testing.assert_close(probs[row, s], expected)
            drafted = (*drafted, int(expected.argmax()))
        assert tuple(drafts[row].tolist()) == drafted[1:]


@READING
def test_joint_sums_to_one(condition: Condition) -> None:
    head, unembedding, embeddings = head_of(condition, 3)
    hidden, b = seeded(1, SIZE, seed=5), 2
    pairs = torch.tensor([(b, *pair) for pair in itertools.product(range(VOCAB), repeat=2)])
    joint, _ = log_likelihood(
        head, hidden.expand(len(pairs), -1), pairs[:, 1:], unembedding, None, embeddings[pairs[:, :-1]]
    )
    torch.testing.assert_close(joint.exp().sum(), torch.ones((), dtype=F64))


@READING
@pytest.mark.parametrize("limits", [{}, {"top_k": 3}, {"top_p": 0.8}])
def test_sampled_drafts_follow_what_they_claim(condition: Condition, limits: dict[str, Any]) -> None:
    """Chi-square of all (x_2, x_3), at a temperature, cut and not; the claimed q(x) is the formula's."""
    head, unembedding, embeddings = head_of(condition, 3)
    draws, b, temperature = 20_000, 3, 0.7
    hidden = seeded(1, SIZE, seed=5, scale=0.2)
    embeddings = 0.3 * embeddings
    made = {name: torch.full((draws,), value) for name, value in limits.items()}
    sampling = Sampling(torch.full((draws,), temperature), **made)
    first = torch.full((draws,), b)
    tokens, probs = head.draft(
        hidden.expand(draws, -1), first, unembedding, None, sampling, torch.Generator().manual_seed(11), embeddings
    )

    def cut(before: tuple[int, ...]) -> torch.Tensor:
        found = slow_conditional(head, hidden[0], unembedding, embeddings, before) ** (1 / temperature)
        found = found / found.sum()
        order = found.argsort(descending=True)
        kept = order[: limits.get("top_k", VOCAB)]
        if "top_p" in limits:
            kept = order[: int((found[order].cumsum(0) < limits["top_p"]).sum()) + 1]
        found = torch.zeros_like(found).scatter(0, kept, found[kept])
        return found / found.sum()

    second = cut((b,))
    expected = torch.stack([second[x] * cut((b, x)) for x in range(VOCAB)]).flatten() * draws
    counts = torch.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2)
    often = expected >= 5
    assert int(often.sum()) >= 6
    assert counts[expected == 0].sum() == 0
    rest = [[float(part[~often].sum())] for part in (counts, expected)]
    observed, wanted = ([*part[often].tolist(), *more] for part, more in zip((counts, expected), rest, strict=True))
    if rest[1][0] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert chisquare(observed, wanted).pvalue > 1e-3
    torch.testing.assert_close(probs[0, 0], second)
    for row in range(20):
        torch.testing.assert_close(probs[row, 1], cut((b, int(tokens[row, 0]))))


@CONDITIONS
def test_tensors_round_trip(condition: Condition) -> None:
    head, _, _ = head_of(condition)
    config = CPConfig(
        verifier="m", positions=POSITIONS, rank=RANK, condition=condition, num_speculative_tokens=3,
        target=TargetLayers(model_type="llama", hidden_size=SIZE, vocab_size=VOCAB, num_hidden_layers=2),
    )  # fmt: skip
    tensors = head.tensors()
    assert {name: [*tensor.shape] for name, tensor in tensors.items()} == config.shapes()
    again = CPHead.from_tensors(tensors)
    assert (again.positions, again.condition, again.factors) == (POSITIONS, condition, config.factors)
    assert all(torch.equal(value, tensors[name]) for name, value in again.tensors().items())
    assert CPConfig.model_validate(config.to_json()) == config
    old = config.to_json()
    del old["condition"]
    if condition == "none":
        assert CPConfig.model_validate(old) == config, "heads from before there were conditions"


def test_a_condition_needs_what_it_reads() -> None:
    head, unembedding, embeddings = head_of("chain")
    hidden = seeded(1, SIZE)
    with pytest.raises(ValueError, match="condition='chain' reads 1 tokens; give their embeddings"):
        head.log_weights(hidden)
    with pytest.raises(ValueError, match="condition='chain' reads 3 tokens; give their embeddings"):
        head.logits(hidden, unembedding, None, embeddings[None, :2])
    given: dict[str, Any] = {"model": "m", "data": ("-",), "out": "o"}
    with pytest.raises(ValidationError, match="condition 'token' needs factorised heads; use 'none'"):
        CPOptions(**given, factorised=False)
    with pytest.raises(ValidationError, match="needs 3 positions at least; use 'token'"):
        CPOptions(**given, condition="chain", positions=2)


def test_cost_of_a_condition() -> None:
    """Three drafts of rank 2: transforms, matrices that read tokens, and reads of the LM head."""
    target = TargetLayers(model_type="llama", hidden_size=SIZE, vocab_size=64, num_hidden_layers=2)
    counts = [{"drafted": 9.0, "cycles": 9.0, "length": 1.5}] * 3
    timing = {"seconds": {"layer": {1: 1.0}, "lm_head": {1: 1.0}}, "lm_head_share": 0.1, "transform_in_layers": 1.0}
    acceptance = {name: {"by_drafts": counts} for name in ("greedy", "T 0.8")}
    parts = CPParts.model_validate({"timing": timing, "acceptance": acceptance})
    found = {}
    for condition in ("none", "token", "chain"):
        config = CPConfig(
            verifier="m", positions=4, rank=2, condition=condition, num_speculative_tokens=3, target=target
        )
        three = list(config.settings(parts, greedy=True))[2]
        found[condition] = (three.layers, three.reads, three.rows)
    assert found == {"none": (8, 1, 8), "token": (6 + 3, 1, 6), "chain": (6 + 3 + 2, 3, 2)}


@CONDITIONS
def test_ridge_finds_a_linear_model(condition: Condition) -> None:
    """States that follow from what the head reads, exactly: the first transforms are the matrices that made them."""
    head = CPHead(SIZE, POSITIONS, 2, condition=condition)
    noise = CPHead(SIZE, POSITIONS, 2, condition=condition).transforms
    generator = torch.Generator().manual_seed(0)
    made, read, before = (torch.randn(POSITIONS, SIZE, SIZE, generator=generator) for _ in range(3))
    hidden, embedded = torch.randn(400, SIZE, generator=generator), torch.randn(400, 3, SIZE, generator=generator) * 0.1
    states = [hidden]
    for s in range(1, POSITIONS):
        found = hidden @ made[s].T
        if condition != "none":
            found = found + embedded[:, 0] @ read[s].T
        if condition == "chain" and s > 1:
            found = found + embedded[:, s - 1] @ before[s].T
        states.append(found)
    ridge_start(
        head, iter([(torch.stack(states, 1)[:250], embedded[:250]), (torch.stack(states, 1)[250:], embedded[250:])])
    )
    assert head.transforms is not None and noise is not None
    made[0] = torch.eye(SIZE)
    close: dict[str, Any] = {"rtol": 0.02, "atol": 0.02}
    for index, position in enumerate(range(head.lead, POSITIONS)):
        for expert in range(2):
            start = head.transforms[index, expert] - (noise[index, expert] - torch.eye(SIZE))
            torch.testing.assert_close(start, made[position], **close)
        if head.token is not None:
            torch.testing.assert_close(head.token[index], read[position], **close)
        if head.previous is not None and index:
            torch.testing.assert_close(head.previous[index - 1], before[position], **close)


def recipe_of(model: Path, **options: Any) -> CPRecipe:
    given = {"model": str(model), "data": ("-",), "out": "-", "rank": 2, "positions": 4, "stored_dtype": "float32"}
    target = Target(str(model), torch.device("cpu"), torch.float32)
    return CPRecipe(CPOptions(**{**given, **options}), target)


def windows(count: int = 3, length: int = 40) -> Batch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 250, (count, length), generator=generator)
    return Batch(ids, torch.arange(length).expand(count, -1))


@CONDITIONS
@pytest.mark.parametrize("vocabulary", [0, 120])
def test_loss_is_the_formula(tiny_model: Callable[..., Path], condition: Condition, vocabulary: int) -> None:
    """Cross-entropy to the target's top-k at each position, the text's likelihood and the balance; and its gradient."""
    recipe = recipe_of(
        tiny_model(), condition=condition, distillation=0.7, distillation_top_k=5, train_vocab_size=vocabulary
    )
    for seed, parameter in enumerate(recipe.parameters()):
        parameter.data += seeded(*parameter.shape, seed=seed, scale=0.05).float()
    batch, target, head = windows(), recipe.target, recipe.head
    kept = torch.arange(target.vocab_size)
    if vocabulary:
        counts = torch.bincount(batch.input_ids.flatten(), minlength=target.vocab_size)
        kept = most_frequent(counts, vocabulary)
        recipe.use_vocabulary(kept)
    loss, figures = recipe.loss(batch)
    loss.backward()
    found = [parameter.grad.clone() for parameter in recipe.parameters() if parameter.grad is not None]
    assert len(found) == len(list(recipe.parameters()))
    recipe.zero_grad()

    place = {int(token): index for index, token in enumerate(kept)}
    final = target.run(batch).final.view(3, 40, -1)
    log_p = functional.log_softmax(final @ target.unembedding.T, -1)
    total: torch.Tensor = torch.zeros(())
    nll = torch.zeros(())
    gates = []
    for row, t in itertools.product(range(3), range(40 - 4)):
        text = batch.input_ids[row, t + 1 : t + 5]
        context = target.embed(text[None, :-1])
        factors = head.logits(final[row, t][None], target.unembedding[kept], None, context)[0].log_softmax(-1)
        weights = head.log_weights(final[row, t][None], context)[0]
        gates.append(weights)
        for index, s in enumerate(range(1 + head.lead, 5)):
            mixed = torch.logsumexp(weights[:, None] + factors[index], 0)
            best = log_p[row, t + s - 1].topk(5)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if token in place:
                    total = total - 0.7 * torch.tensor(value).exp() * mixed[place[token]]
            if (token := int(text[s - 1])) in place:
                nll = nll - mixed[place[token]]
                weights = torch.log_softmax(weights + factors[index, :, place[token]], 0)
    expected = (total + 0.3 * nll) / (3 * 36) + 0.1 * balance_loss(torch.stack(gates))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(figures["joint"], nll.detach(), rtol=1e-4, atol=1e-4)
    expected.backward()
    for gradient, parameter in zip(found, recipe.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-5)


def test_a_share_of_the_positions(tiny_model: Callable[..., Path]) -> None:
    """Drawn anew in each epoch while training; the evaluation reads all."""
    recipe, batch = recipe_of(tiny_model(), position_share=0.25), windows()
    _, valid = batch.ahead(4)
    chosen = [recipe.train().share_of(valid, 0.25) for _ in range(2)]
    assert not torch.equal(*chosen)
    assert all(len(rows) == round(0.25 * int(valid.sum())) and valid[rows].all() for rows in chosen)
    assert int(recipe.loss(batch)[1]["rows"]) == len(chosen[0])
    assert int(recipe.eval().loss(batch)[1]["rows"]) == int(valid.sum())


@CONDITIONS
def test_ridge_starts_below_the_identity(tiny_model: Callable[..., Path], condition: Condition) -> None:
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
        assert rates[:2] == [1e-3, 1e-3] and rates[2:] == pytest.approx([8e-3] * 2 * recipe.head.lead, rel=0.2)
    assert losses["ridge"] < losses["identity"]

# SPDX-License-Identifier: Apache-2.0
"""Losses over a weighted sample of the vocabulary and over a share of the positions: close to those over all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import patterned_texts, write_texts

from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.heads.training import loop
from vllm_ppd.heads.training.vocabulary_sample import VocabularySample
from vllm_ppd.kernels.unembedding_loss import kl_to_teacher, token_log_probs

VOCAB, HIDDEN = 3000, 24
CPU = torch.device("cpu")


@pytest.fixture
def setting() -> dict[str, torch.Tensor]:
    """An LM head over tokens of Zipf's frequencies, and a batch of states whose tokens it samples."""
    generator = torch.Generator().manual_seed(0)
    counts = (1e6 / torch.arange(1, VOCAB + 1)).to(torch.int64)[torch.randperm(VOCAB, generator=generator)]
    unembedding = 0.4 * torch.randn(VOCAB, HIDDEN, generator=generator)
    teacher = torch.randn(80, HIDDEN, generator=generator)
    bias = counts.log()
    probs = torch.softmax(teacher @ unembedding.T + bias, dim=-1)
    return {
        "counts": counts, "unembedding": unembedding, "bias": bias, "teacher": teacher,
        "students": (teacher + 0.4 * torch.randn(2, 80, HIDDEN, generator=generator)),
        "tokens": torch.multinomial(probs, 1, generator=generator)[:, 0],
    }  # fmt: skip


def draw(setting: dict[str, torch.Tensor], size: int) -> Any:
    sample = VocabularySample(setting["counts"], size, CPU)
    return sample.draw(setting["unembedding"], setting["bias"], setting["tokens"])


def test_certain_tokens_are_there_and_the_rest_is_counted(setting: dict[str, torch.Tensor]) -> None:
    drawn = draw(setting, 400)
    assert len(drawn.unembedding) == pytest.approx(400, abs=1)
    frequent = setting["counts"].topk(200).indices
    certain = torch.cat([frequent, setting["tokens"]]).unique()
    place = drawn.place(certain)
    assert int(place.min()) >= 0
    assert torch.equal(drawn.unembedding[place], setting["unembedding"][certain])
    weights = (drawn.bias - setting["bias"][drawn.columns.argsort()[-len(drawn.bias) :]]).exp()
    torch.testing.assert_close(weights[place], torch.ones(len(certain)))
    # Each of the others stands for as many as were left out: together they are the vocabulary.
    assert float(weights.sum()) == pytest.approx(VOCAB, rel=1e-4)


def test_the_partition_function_is_estimated_without_bias(setting: dict[str, torch.Tensor]) -> None:
    exact = (setting["teacher"] @ setting["unembedding"].T + setting["bias"]).double().exp().sum(1)
    torch.manual_seed(0)
    draws = []
    for _ in range(300):
        drawn = draw(setting, 400)
        draws.append((setting["teacher"] @ drawn.unembedding.T + drawn.bias).double().exp().sum(1))
    estimates = torch.stack(draws) / exact
    error = (estimates.mean(0) - 1) / (estimates.std(0) / math.sqrt(len(draws)))
    assert float(error.square().mean()) < 2  # standard errors
    assert float(estimates.std(0).median()) < 0.2


def test_a_sum_over_likely_tokens_is_estimated_without_bias(setting: dict[str, torch.Tensor]) -> None:
    """What distillation needs of a sample: each drawn token's value stands for those of the tokens left out."""
    teacher = torch.softmax(setting["teacher"] @ setting["unembedding"].T + setting["bias"], -1).topk(400)
    values = teacher.values * teacher.indices.cos().square()
    torch.manual_seed(0)
    draws = []
    for _ in range(300):
        drawn = draw(setting, 400)
        placed = drawn.place(teacher.indices)
        draws.append(torch.stack([drawn.weighted(placed, values).sum(), (values * (placed >= 0)).sum()]))
    (mean, bare), (spread, _) = torch.stack(draws).mean(0), torch.stack(draws).std(0) / math.sqrt(len(draws))
    assert abs(float(mean - values.sum())) < 3 * float(spread)
    assert float(values.sum() - bare) > 10 * float(spread)  # as if each stood for itself


def test_losses_and_gradients_are_close(setting: dict[str, torch.Tensor]) -> None:
    def found(unembedding: torch.Tensor, bias: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
        students = setting["students"].clone().requires_grad_()
        loss, _ = kl_to_teacher(students, setting["teacher"], unembedding, bias, False)
        (pull,) = torch.autograd.grad(loss.sum(), students)
        ce = -token_log_probs(students[0], tokens, unembedding, bias)
        (push,) = torch.autograd.grad(ce.sum(), students)
        return [loss.detach().mean(), pull, ce.detach().mean(), push[0]]

    exact = found(setting["unembedding"], setting["bias"], setting["tokens"])
    torch.manual_seed(0)
    draws = [draw(setting, 600) for _ in range(25)]
    each = [found(drawn.unembedding, drawn.bias, drawn.place(setting["tokens"])) for drawn in draws]
    near = [torch.stack(values).mean(0) for values in zip(*each, strict=True)]
    # As if the vocabulary were the sample: what the weights are for.
    bare = [setting["bias"][drawn.columns.argsort()[-len(drawn.bias) :]] for drawn in draws]
    unweighted = [
        torch.stack(values).mean(0)
        for values in zip(
            *(
                found(drawn.unembedding, bias, drawn.place(setting["tokens"]))
                for drawn, bias in zip(draws, bare, strict=True)
            ),
            strict=True,
        )
    ]
    for loss, gradient in ((0, 1), (2, 3)):
        assert float(near[loss]) == pytest.approx(float(exact[loss]), rel=0.03)
        one, mean, wrong = (
            float((values[gradient] - exact[gradient]).norm() / exact[gradient].norm())
            for values in (each[0], near, unweighted)
        )
        assert one < 0.5 and mean < 0.15 and mean < 0.5 * wrong


def test_a_sample_as_large_as_the_vocabulary_is_the_vocabulary(setting: dict[str, torch.Tensor]) -> None:
    drawn = draw(setting, 2 * VOCAB)
    assert drawn.unembedding is setting["unembedding"] and drawn.bias is setting["bias"]
    assert torch.equal(drawn.place(setting["tokens"]), setting["tokens"])


@pytest.fixture
def train(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    data = write_texts(tmp_path / "data.jsonl", patterned_texts(120, 6))

    def run(kind: str = "early", out: str = "heads", **options: Any) -> dict[str, Any]:
        given = {
            "steps": 12, "sequence_length": 64, "batch_size": 4, "precision": "float32", "stored_dtype": "float32",
            "device": "cpu", "held_out": 0.1, "evaluation_tokens": 1024, "learning_rate": 3e-3,
        }  # fmt: skip
        loop.train(
            KINDS[kind].options(
                **{**given, **options}, model=str(tiny_model()), data=(str(data),), out=str(tmp_path / out)
            )
        )
        return json.loads((tmp_path / out / "provenance.json").read_text())

    return run


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_early_heads_learn_from_samples(train: Callable[..., dict[str, Any]], loss: str) -> None:
    """Nearly as much as from all: the held-out figures are over the whole vocabulary and all positions."""
    options = {"exit_layers": (2, 4), "loss": loss}
    whole = train(out="whole", **options)
    facts = train(vocabulary_sample=120, position_share=0.5, **options)
    assert facts["held_out_before"] == whole["held_out_before"]
    for name, before in facts["held_out_before"].items():
        ours, exact = (found["held_out_after"][name][f"{loss}_nats"] for found in (facts, whole))
        fell = before[f"{loss}_nats"] - exact
        assert fell > 0 and ours < before[f"{loss}_nats"] - 0.8 * fell


def test_less_is_read(train: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ppd.heads.early import recipe

    sizes = set()
    real = recipe.kl_to_teacher

    def noted(students: torch.Tensor, teacher: Any, unembedding: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if students.requires_grad:
            sizes.add((students.shape[1], len(unembedding)))
        return real(students, teacher, unembedding, *args, **kwargs)

    monkeypatch.setattr(recipe, "kl_to_teacher", noted)
    train(vocabulary_sample=120, position_share=0.25, steps=3)
    assert all(0.23 * 256 < rows <= 64 for rows, _ in sizes)
    assert all(columns < 200 < tiny.VOCAB for _, columns in sizes)


def test_ppds_recipe_is_the_default_of_its_head_and_loss() -> None:
    common: dict[str, Any] = {"model": "m", "data": ("d",), "out": "o"}
    make = KINDS["early"].options
    ppd = make(**common, head="classifier", loss="ce")
    assert (ppd.learning_rate, ppd.batch_size, ppd.epochs, ppd.warmup) == (2e-5, 128, 3.0, 0.04)
    assert make(**common, head="classifier", loss="ce", batch_size=4).batch_size == 4
    assert make(**common, head="classifier").learning_rate == make(**common).learning_rate == 5e-3
    with pytest.raises(ValueError, match="whole classifiers learn all their rows"):
        make(**common, head="classifier", vocabulary_sample=64)


@pytest.mark.parametrize(("distillation", "figure", "share"), [(0.0, "nats", 0.7), (1.0, "distilled_nats", 0.4)])
def test_dynamo_learns_from_samples(
    train: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    distillation: float,
    figure: str,
    share: float,
) -> None:
    """Nearly as much as from all, less where the target's own (random) distribution is flat; nothing reads head 1."""
    from vllm_ppd.heads.dynamo import recipe

    sizes: list[int] = []
    real = recipe.token_log_probs

    def noted(states: torch.Tensor, tokens: Any, unembedding: torch.Tensor, bias: Any) -> Any:
        if torch.is_grad_enabled():
            sizes.append(len(unembedding))
        return real(states, tokens, unembedding, bias)

    monkeypatch.setattr(recipe, "token_log_probs", noted)
    options = {"mask_entries": 0, "distillation": distillation}
    whole = train("dynamo", out="whole", **options)
    assert sizes == [tiny.VOCAB] * 2 * 12
    sizes.clear()
    facts = train("dynamo", vocabulary_sample=120, position_share=0.5, **options)
    assert len(sizes) == 2 * 12 and max(sizes) < 200
    for name in (f"head 2 {figure}", f"head 3 {figure}"):
        before, ours, exact = (
            facts["held_out_before"][name],
            facts["held_out_after"][name],
            whole["held_out_after"][name],
        )
        assert before > exact and ours < before - share * (before - exact)

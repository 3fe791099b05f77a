# SPDX-License-Identifier: Apache-2.0
"""Runs that can be watched: progress in every phase, the curve, evaluations, and which
weights are written.
"""

import itertools
import json
import math
from functools import partial
from typing import Any

import pytest
import torch
from conftest import Factory
from records import read
from safetensors.torch import load_file

from vllm_ppd.heads.training import loop
from vllm_ppd.heads.training.checkpoint import Evaluation, Progress
from vllm_ppd.heads.training.recipe import Recipe
from vllm_ppd.heads.training.tokens import Batch


@pytest.fixture
def train(train: Factory) -> Factory:
    """Of two exits."""
    return partial(train, exit_layers=(2, 4), evaluation_tokens=512)


def test_curve(train: Factory) -> None:
    folder = train(evaluate_every=4)
    points = read(folder / loop.CURVE)
    held_out = [point for point in points if "held_out" in point]
    assert [point["step"] for point in held_out] == [0, 4, 8, 12]
    facts = json.loads((folder / "provenance.json").read_text())
    assert held_out[0]["held_out"] == facts["held_out_before"]
    assert held_out[-1]["held_out"] == facts["held_out_after"]
    losses = [point for point in points if "loss" in point]
    assert [point["step"] for point in losses] == list(range(1, 13))
    assert losses[-1]["tokens"] == 12 * 4 * 64 == facts["tokens"]
    for point in held_out:
        figures = point["held_out"]
        exits = [
            value for name, value in figures.items() if name.startswith("exit")
        ]
        # The held-out loss is the figures' sum over the exits, up to their rounding.
        assert point["held_out_loss"] == pytest.approx(
            sum(x["kl_nats"] for x in exits), abs=1e-3
        )
        by_position = figures["accepted_by_position"]
        assert figures["accepted_a_step"] == pytest.approx(
            sum(by_position), abs=1e-3
        )
        assert (
            by_position == sorted(by_position, reverse=True)
            and len(by_position) == 3
        )
        # A draft is right where an exit and the target choose the same token.
        matches = sum(x["match"] for x in exits) / len(exits)
        assert by_position[0] == pytest.approx(matches, abs=0.02)


@pytest.mark.parametrize(
    ("losses", "accepted", "better"),
    [
        # 1.999 is less than 0.1 % below 2.
        ([3, 2, 1.999, math.nan, 1], [None] * 5, [0, 1, 4]),
        # The drafts decide, whatever the loss does, as long as it is a number.
        ([3, 4, 1, 1, math.nan], [0.3, 0.4, 0.4003, 0.39, 0.5], [0, 1]),
    ],
)
def test_progress(
    losses: list[Any],
    accepted: list[Any],
    better: list[int],
) -> None:
    progress = Progress()
    for step, (loss, share) in enumerate(zip(losses, accepted, strict=True)):
        evaluation = Evaluation(
            step=step,
            loss=loss,
            figures={},
            accepted=share,
        )
        assert progress.take(evaluation) == (step in better)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Factory:
    """judged(best): have the evaluation of a step accept the most drafts; returns the
    weights by step.
    """

    def noted(best: int) -> dict[int, dict[str, torch.Tensor]]:
        real = loop.Run.evaluate
        seen: dict[int, dict[str, torch.Tensor]] = {}

        def falling(
            run: loop.Run,
            when: str,
        ) -> Evaluation:
            evaluation = real(run, when)
            step = evaluation.step
            tensors = run.recipe.tensors()
            seen[step] = {
                name: tensor.clone() for name, tensor in tensors.items()
            }
            evaluation.accepted = 1 / (1 + abs(step - best))
            return evaluation

        monkeypatch.setattr(loop.Run, "evaluate", falling)
        return seen

    return noted


@pytest.mark.parametrize(
    ("settings", "best", "steps", "crashes"),
    [
        # It ends two evaluations later.
        ({"steps": 40, "evaluate_every": 2, "patience": 2}, 4, 8, False),
        ({"steps": 8, "evaluate_every": 2}, 4, 8, False),
        ({"steps": 8}, 0, 8, False),  # a run that makes its first weights worse
        # Before and after a checkpoint that knows of them.
        ({"steps": 8, "evaluate_every": 2, "save_every": 1}, 2, 8, True),
        ({"steps": 8, "evaluate_every": 2, "save_every": 100}, 2, 8, True),
    ],
)
def test_the_best_weights_are_written(
    train: Factory,
    judged: Factory,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    best: int,
    steps: int,
    crashes: bool,
) -> None:
    """Also after a crash."""
    seen = judged(best)
    if crashes:
        compute = Recipe.forward
        losses = itertools.count(1)

        def crashing(self: Recipe, batch: Batch) -> Any:
            if next(losses) == 5:
                raise RuntimeError("crashed")
            return compute(self, batch)

        monkeypatch.setattr(Recipe, "forward", crashing)
        with pytest.raises(RuntimeError, match="crashed"):
            train(**settings)
    folder = train(**settings)
    facts = json.loads((folder / "provenance.json").read_text())
    assert facts["steps"] == steps
    assert facts["stopped_flat"] == (steps < settings["steps"])
    assert facts["held_out_after_step"] == best
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(tensor, seen[best][name])
        if name != "token_counts":
            assert not torch.equal(tensor, seen[steps][name])

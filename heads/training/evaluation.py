# SPDX-License-Identifier: Apache-2.0
"""The held-out loss and figures of a run, and whether they still improve."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel

from vllm_ppd.heads.training.options import TrainingOptions
from vllm_ppd.heads.training.parallel import Processes
from vllm_ppd.heads.training.tokens import TokenStore

if TYPE_CHECKING:
    from vllm_ppd.heads.training.recipe import Recipe

LEAST = 1e-3  # least relative improvement of the decisive figure that counts


class Evaluation(BaseModel):
    """Held-out loss and readable figures after some steps."""

    step: int
    loss: float | None  # None if nothing held out counts
    figures: dict[str, Any]
    # Greedy drafts per step, teacher-forced; None if not counted
    accepted: float | None = None

    def is_better_than(self, other: Evaluation | None) -> bool:
        """Whether more drafts are accepted, or as many at a lower loss; never if the
        loss is not finite.
        """
        if self.loss is None or not math.isfinite(self.loss):
            return False
        if other is None or other.loss is None:
            return True
        if (
            self.accepted == other.accepted
            or self.accepted is None
            or other.accepted is None
        ):
            return self.loss < other.loss - LEAST * abs(other.loss)
        return self.accepted > other.accepted * (1 + LEAST)


class Progress(BaseModel):
    """The state of a run's evaluations that decides when it stops."""

    best: Evaluation | None = None
    last: Evaluation | None = None
    stale: int = 0  # evaluations since the best one

    def take(self, evaluation: Evaluation) -> bool:
        """Record an evaluation; returns whether it is better than the best before it."""
        better = evaluation.is_better_than(self.best)
        self.last = evaluation
        if better:
            self.best = evaluation
            self.stale = 0
        elif evaluation.loss is not None:
            self.stale += 1
        return better


def evaluated_windows(store: TokenStore, options: TrainingOptions) -> int:
    """How many held-out windows an evaluation reads."""
    wanted = options.evaluation_tokens // store.length
    return max(1, min(store.num_windows("held_out"), wanted))


@torch.no_grad()
def evaluate(
    recipe: Recipe,
    store: TokenStore,
    options: TrainingOptions,
    processes: Processes,
    step: int,
    when: str,
) -> Evaluation:
    """Loss and figures on held-out windows, the same ones every time."""
    recipe.eval()
    windows = evaluated_windows(store, options)
    size = max(
        1, options.batch_size // (options.accumulation * processes.num_processes)
    )
    sums: defaultdict[str, float] = defaultdict(float)
    total = 0.0
    tokens = windows * store.length
    with processes.bar(f"evaluating ({when})", tokens, leave=False) as progress:
        for start in range(0, windows, size):
            batch = store.batch("held_out", range(start, min(start + size, windows)))
            with processes.arithmetic(options.precision):
                loss, counts = recipe.loss(batch.to(processes.device))
            total += float(loss) * len(batch.input_ids) / windows
            for name, value in counts.items():
                for index, item in enumerate(value.flatten().tolist()):
                    key = f"{name}.{index}" if value.dim() else name
                    sums[key] += item
            progress.update(batch.num_tokens)
    if not sums:
        return Evaluation(step=step, loss=None, figures={})
    figures = recipe.summary(sums)
    shares = [
        sums[name] / sums["accepted_of"]
        for name in sums
        if name.startswith("accepted.")
    ]
    # The mean over all processes, which must agree on when to stop.
    totals = torch.tensor(
        [total, sum(shares)], dtype=torch.float64, device=processes.device
    )
    loss, accepted = processes.reduce(totals, "mean").tolist()
    if not shares:
        return Evaluation(step=step, loss=loss, figures=figures)
    figures["accepted_a_step"] = round(accepted, 4)
    figures["accepted_by_position"] = [round(share, 4) for share in shares]
    # A target that is trained, too, is another one in each evaluation: drafts of its
    # guesses at first are the easiest.
    decisive = None if recipe.target.trainable else accepted
    return Evaluation(step=step, loss=loss, figures=figures, accepted=decisive)

# SPDX-License-Identifier: Apache-2.0
"""The held-out loss and figures of a run, and whether they still improve."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict
from tqdm import tqdm

from vllm_ppd.heads.training.options import TrainingOptions
from vllm_ppd.heads.training.parallel import Processes
from vllm_ppd.heads.training.tokens import TokenStore

if TYPE_CHECKING:
    from vllm_ppd.heads.training.recipe import Recipe

LEAST = 1e-3  # share of the loss by which it must fall to count as falling


class Evaluation(BaseModel):
    """Held-out loss and readable figures after some steps."""

    model_config = ConfigDict(extra="forbid")

    step: int
    loss: float
    figures: dict[str, Any]


class Progress(BaseModel):
    """The evaluations of a run, as far as they decide when it stops."""

    model_config = ConfigDict(extra="forbid")

    best: Evaluation | None = None
    last: Evaluation | None = None
    stale: int = 0  # evaluations since the best

    def take(self, evaluation: Evaluation) -> bool:
        """Whether the loss fell; losses that are not finite do not."""
        self.last, loss = evaluation, evaluation.loss
        fell = math.isfinite(loss) and (self.best is None or loss < self.best.loss - LEAST * abs(self.best.loss))
        self.best, self.stale = (evaluation, 0) if fell else (self.best, self.stale + 1)
        return fell


@torch.no_grad()
def evaluate(
    recipe: Recipe, store: TokenStore, options: TrainingOptions, processes: Processes, step: int, when: str
) -> Evaluation:
    """Loss and figures on held-out windows, the same ones every time."""
    recipe.eval()
    windows = max(1, min(store.num_windows("held_out"), options.evaluation_tokens // store.length))
    size = max(1, options.batch_size // (options.accumulation * processes.num_processes))
    sums: dict[str, float] = {}
    total = 0.0
    progress = tqdm(
        total=windows * store.length, unit=" tokens", unit_scale=True, mininterval=1, leave=False,
        desc=f"evaluating ({when})", disable=not processes.is_main_process,
    )  # fmt: skip
    with progress:
        for start in range(0, windows, size):
            batch = store.batch("held_out", range(start, min(start + size, windows))).to(processes.device)
            with processes.arithmetic(options.precision):
                loss, counts = recipe.loss(batch)
            total += float(loss) * len(batch.input_ids) / windows
            for name, value in counts.items():
                for index, item in enumerate(value.reshape(-1).tolist()):
                    key = name if value.dim() == 0 else f"{name}.{index}"
                    sums[key] = sums.get(key, 0.0) + item
            progress.update(batch.num_tokens)
    figures = recipe.summary(sums)
    if "nan" in str(figures).lower():
        total = math.nan
    # The same in all processes, which must agree on when to stop.
    totals = processes.reduce(torch.tensor(total, dtype=torch.float64, device=processes.device), "sum")
    return Evaluation(step=step, loss=float(totals) / processes.num_processes, figures=figures)

# SPDX-License-Identifier: Apache-2.0
"""The base model's own likelihood of generated texts, in place of a judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_ppd.heads.calibration.text import Texts, log_prob_of
from vllm_ppd.heads.training.target import Target


@torch.no_grad()
def mean_log_prob(target: Target, texts: Texts, batch: int, autocast: Any) -> torch.Tensor:
    """Mean log-probability a generated token given all before it, at temperature 1, in nats: [texts]."""
    found = []
    for part, windows in texts.batches(batch):
        with autocast():
            final = target.run(windows).final
        generated, valid = texts.generated[part], texts.valid()[part]
        log_p = log_prob_of(target, texts.reading(final, windows), generated.flatten(), 0.0).view_as(generated)
        found.append((log_p * valid).sum(1) / valid.sum(1).clamp(min=1))
    return torch.cat(found)


def win_rate(
    ours: torch.Tensor,  # [prompts]
    base: torch.Tensor,  # [texts of the base, prompts]
) -> float | None:
    """Wins over losses of texts against the base's of the same prompt, the likelier one winning; None: no losses."""
    losses = int((ours < base).sum())
    return int((ours > base).sum()) / losses if losses else None


class SameQuality(NamedTuple):
    """Where the regression of win rates over speed-ups is 1 (DynaMo, section 4.3)."""

    speed_up: float  # within 1 and the most tokens a pass
    extrapolated: bool  # beyond what was measured: "theoretical", marked * in the paper


def same_quality(points: Sequence[tuple[float, float]], most: float) -> SameQuality | None:
    """From (speed-up, win rate); None if the texts are worse at every speed-up, or there are too few points."""
    if len({x for x, _ in points}) < 2:
        return None
    speed_ups, rates = np.array(points).T
    slope, start = np.polyfit(speed_ups, rates, 1)
    if slope >= 0:
        return SameQuality(most, True) if rates.min() >= 1 else None
    crossing = (1 - start) / slope
    if crossing < 1:
        return None
    return SameQuality(float(min(crossing, most)), bool(crossing > speed_ups.max()))

# SPDX-License-Identifier: Apache-2.0
"""Which setting of heads is recommended from what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.calibration.setting import Setting


def recommend(config: HeadsConfig, parts: dict[str, Any]) -> dict[str, Any]:
    """The setting of the highest predicted speed-up on sampled texts, whose acceptance no loops flatter."""
    share = parts["timing"]["lm_head_share"]
    best: dict[str, Any] = {"predicted_speedup": 0.0}
    for setting in settings(config, parts):
        if not setting.trained:
            continue
        cost = setting.cycle(config.target.num_hidden_layers, share)
        if setting.length / cost > best["predicted_speedup"]:
            best = {**setting.options, "acceptance_length": setting.length, "cycle_in_passes": round(cost, 4)}
            best["predicted_speedup"] = round(setting.length / cost, 4)
    return best


def settings(config: HeadsConfig, parts: dict[str, Any], greedy: bool = False) -> Iterator[Setting]:
    """Every setting that was measured, on sampled or on greedy texts."""
    return config.settings(parts, greedy)

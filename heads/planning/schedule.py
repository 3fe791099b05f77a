# SPDX-License-Identifier: Apache-2.0
"""How many drafts pay at each batch size on the machine that heads were calibrated on, as vLLM's scheduler takes it."""

from __future__ import annotations

from typing import Any

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.calibration.recommend import settings
from vllm_ppd.heads.layout import LARGEST_BATCH
from vllm_ppd.heads.planning.machine import Measured
from vllm_ppd.heads.planning.predict import drafting

CONSIDERED = 512  # requests; larger batches keep to what this one has


def drafts_by_batch_size(config: HeadsConfig, parts: dict[str, Any], chosen: dict[str, Any]) -> list[list[int]]:
    """The number of drafts with the highest predicted speed-up at each batch size, 0 where none is above 1.

    Args:
        config: of the heads.
        parts: what was measured.
        chosen: the recommended setting; its number of drafts is the most, its other options stay.

    Returns:
        [first batch size, last batch size, drafts] of each range, without gaps, from 1 on.
    """
    most = chosen["num_speculative_tokens"]
    machine, layers = Measured(parts["timing"]["seconds"]), config.target.num_hidden_layers
    ways = [
        (setting.drafts, drafting(setting, config.kind, setting.options, machine, layers))
        for setting in settings(config, parts)
        if setting.trained and setting.drafts <= most and _alike(setting.options, chosen)
    ]
    ranges: list[list[int]] = []
    for size in range(1, CONSIDERED + 1):
        speedup, drafts = max(((way.speedup(size), n) for n, way in ways), default=(0.0, 0))
        drafts = drafts if speedup > 1 else 0
        if ranges and ranges[-1][2] == drafts:
            ranges[-1][1] = size
        else:
            ranges.append([size, size, drafts])
    ranges[-1][1] = LARGEST_BATCH
    return ranges


def _alike(options: dict[str, Any], chosen: dict[str, Any]) -> bool:
    return all(chosen[name] == value for name, value in options.items() if name != "num_speculative_tokens")

# SPDX-License-Identifier: Apache-2.0
"""The setting that a calibration recommends, and the number of drafts that pay at each batch size on its machine."""

from typing import Any

from vllm_ppd.heads.base import LARGEST_BATCH, HeadsConfig
from vllm_ppd.heads.measured import Parts
from vllm_ppd.heads.planning.machine import measured
from vllm_ppd.heads.planning.predict import Drafting

CONSIDERED = 512  # requests; larger batches use the number of drafts at this size


def recommend(config: HeadsConfig, parts: Parts) -> dict[str, Any]:
    """The setting with the highest predicted speed-up on sampled texts, which do not run into loops."""
    share = parts.timing.lm_head_share
    best: dict[str, Any] = {"predicted_speedup": 0.0}
    for setting in config.settings(parts, greedy=False):
        cost = setting.cycle(config.target.num_hidden_layers, share)
        if setting.trained and setting.length / cost > best["predicted_speedup"]:
            best = {**setting.options, "acceptance_length": setting.length, "cycle_in_passes": round(cost, 4)}
            best["predicted_speedup"] = round(setting.length / cost, 4)
    return best


def drafts_by_batch_size(config: HeadsConfig, parts: Parts, chosen: dict[str, Any]) -> list[list[int]]:
    """The number of drafts with the highest predicted speed-up at each batch size, 0 where none is above 1.

    Args:
        config: of the heads.
        parts: what was measured.
        chosen: the recommended setting; its number of drafts is the most, its other options stay.

    Returns:
        [first batch size, last one, drafts] of each range, without gaps, from 1 on, as vLLM's scheduler takes it.
    """
    number = "num_speculative_tokens"
    machine, layers = measured(parts.timing.seconds), config.target.num_hidden_layers
    settings = [
        Drafting(config.method, {}, machine, layers, setting)
        for setting in config.settings(parts, greedy=False)
        if setting.trained and setting.drafts <= chosen[number]
        and all(chosen[name] == value for name, value in setting.options.items() if name != number)
    ]  # fmt: skip
    ranges: list[list[int]] = []
    for size in range(1, CONSIDERED + 1):
        speedup, drafts = max(((x.speedup(size), x.setting.drafts) for x in settings), default=(0.0, 0))
        drafts = drafts if speedup > 1 else 0
        if ranges and ranges[-1][2] == drafts:
            ranges[-1][1] = size
        else:
            ranges.append([size, size, drafts])
    ranges[-1][1] = LARGEST_BATCH
    return ranges

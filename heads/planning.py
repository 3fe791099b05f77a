# SPDX-License-Identifier: Apache-2.0
"""Advice from a calibration: the best setting of some heads, its gain, and PPD's Theorem 4.1."""

import shlex
from typing import Any, NamedTuple

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.measured import Parts


def recommend(config: HeadsConfig, parts: Parts) -> dict[str, Any]:
    """The setting of trained heads with the highest predicted speed-up on sampled
    texts.

    The speed-up is the tokens of a step over its cost, in passes of the target at batch
    1. The cost counts the weights that are read, and leaves out the host's work.

    Returns:
        The fields of the heads' configuration, and `acceptance_length`,
        `cycle_in_passes` and `predicted_speedup`. Only the last one, 0, if nothing was
        measured.
    """
    best: dict[str, Any] = {"predicted_speedup": 0.0}
    for setting in config.settings(parts):
        passes = setting.cycle(
            config.target.num_hidden_layers, parts.timing.lm_head_share
        )
        speedup = round(setting.length / passes, 4)
        if speedup > best["predicted_speedup"]:
            best = dict(setting.options)
            best["acceptance_length"] = setting.length
            best["cycle_in_passes"] = round(passes, 4)
            best["predicted_speedup"] = speedup
    return best


def advice(heads: str, target: str, chosen: dict[str, Any]) -> str:
    """What to do with heads, by what `recommend` has chosen for them."""
    speedup = chosen["predicted_speedup"]
    if speedup <= 1:
        return (
            f"These heads are predicted to gain nothing on this text ({speedup:.2f} "
            "of vLLM's tokens per second): train them on more text of more varied "
            "kinds, or serve without them."
        )
    command = shlex.join(["vllm", "serve", target, "--speculative-model", heads])
    return (
        f"Predicted speed-up at batch 1: {speedup:.2f}, from "
        f"{chosen['acceptance_length']:.3f} tokens in a step of "
        f"{chosen['cycle_in_passes']:.3f} passes. This counts the weights read, not "
        f"the host's work: measure it with `ppd bench decode`.\n\n    {command}"
    )


class Group(NamedTuple):
    """Expected costs of PPD's worker group a token, in layers of one token."""

    latency: float  # layers one after the other
    compute: float  # layers in all


def theorem_4_1(
    num_layers: int, split: int, candidates: int, match_rate: float, tokens: int
) -> Group:
    """PPD, Theorem 4.1, divided by the number of tokens.

    latency = d - (d - d_bar) (l - 1) p_correct / l
    compute = latency + k (d - d_bar)

    Args:
        num_layers: d.
        split: d_bar, the layer at which candidates are read, d / 2 at least.
        candidates: k.
        match_rate: p_correct, the share of tokens that are among the k candidates.
        tokens: l, of a text; nothing starts its first token early.
    """
    late = num_layers - split
    latency = num_layers - late * match_rate * (tokens - 1) / tokens
    return Group(latency, latency + candidates * late)

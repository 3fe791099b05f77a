# SPDX-License-Identifier: Apache-2.0
"""Worker groups in `ppd bench decode`: the contenders of `--group`, and PPD's Theorem 4.1 for them."""

from typing import Any, NamedTuple

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.decode.options import DecodeOptions
from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender
from vllm_ppd.benchmarks.harness.results import Row
from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.io import load_config

STAGES = {"pipeline_parallel_size": 2}
MICRO_STEPS = 8  # per step: the most tokens that a request gets from a step


def contenders(options: DecodeOptions) -> list[Contender]:
    """Two stages, the same again, a group for each number of candidates, and two tensor-parallel ranks.

    Raises:
        BenchError, HeadsError: if the heads are not early heads, or more than one folder is given.
    """
    if len(options.heads) > 1:
        raise BenchError("--heads: give a single folder of early heads for a worker group")
    config: dict[str, Any] = {"method": "ppd", "num_speculative_tokens": options.drafts or MICRO_STEPS - 1}
    if options.heads:
        load_config(options.heads[0], EarlyConfig)
        config["model"] = options.heads[0]
    cut_off = max(options.batch_sizes)
    groups = [
        Contender(f"group, k = {k}", {**config, "candidates": k, "disable_by_batch_size": cut_off}, STAGES)
        for k in options.group
    ]
    ranks = Contender("TP 2", None, {"tensor_parallel_size": 2})
    return [Contender(BASE, None, STAGES), Contender(CONTROL, None, STAGES), *groups, ranks]


class Theorem(NamedTuple):
    """PPD, Theorem 4.1, divided by the tokens l: units are one layer of one token."""

    latency: float  # layers per token, one after the other: d - (d - d_bar) p (l - 1) / l
    compute: float  # layers per token in all: that, and k (d - d_bar)


def theorem(num_layers: int, split: int, candidates: int, match_rate: float, tokens: int | None = None) -> Theorem:
    """Expected latency and compute a token.

    Args:
        num_layers: d.
        split: d_bar, from d/2 up.
        candidates: k.
        match_rate: p_correct.
        tokens: l, of which the first is never started early (None: infinitely many).
    """
    late = num_layers - split
    latency = num_layers - late * match_rate * (1 if tokens is None else (tokens - 1) / tokens)
    return Theorem(latency, latency + candidates * late)


class Matched(NamedTuple):
    """A group's counts of its candidates, beside the theorem."""

    rate: float  # p_correct
    layers: float | None  # run per token, including discarded candidates (None: not counted)
    paper: Theorem


def matched(row: Row, num_layers: int, split: int, candidates: int, tokens: int) -> Matched | None:
    """Of a contender's row of so many tokens per request; None if its candidates started no token."""
    ours = row["ours"]
    tried = ours.get("group_hits", 0) + ours.get("group_misses", 0)
    if not tried:
        return None
    rate = ours["group_hits"] / tried
    ran = [ours[name] for name in ("group_first_stage_layers", "group_last_stage_layers") if name in ours]
    layers = sum(ran) / ours["group_tokens"] if len(ran) == 2 else None
    # The group makes all tokens except the first, which comes from the prompt.
    return Matched(rate, layers, theorem(num_layers, split, candidates, rate, tokens - 1))


def predictions(rows: list[Row], configs: dict[str, Any], num_layers: int, tokens: int) -> dict[str, dict[str, float]]:
    """Speed-ups that the theorem expects of groups, by contender and batch size.

    Args:
        rows: of a run, as decode/table.py makes them.
        configs: speculative_config of each contender, by name.
        num_layers: of the target.
        tokens: of a request.
    """
    predicted: dict[str, dict[str, float]] = {}
    for row in rows:
        config = configs[row["contender"]]
        if config is None:
            continue
        match = matched(row, num_layers, split_of(config, num_layers), config["candidates"], tokens)
        if match is not None:
            by_batch = predicted.setdefault(row["contender"], {})
            by_batch[str(row["batch"])] = round(num_layers / match.paper.latency, 3)
    return predicted


def split_of(config: dict[str, Any], num_layers: int) -> int:
    """The layer at which a group's stages are split, as the server resolves it."""
    from vllm_ppd.vllm_plugins.config.options import parse_options
    from vllm_ppd.vllm_plugins.config.resolve import resolve

    heads = load_config(config["model"], EarlyConfig) if "model" in config else None
    return resolve(parse_options(config), num_layers, heads, stages=2).split

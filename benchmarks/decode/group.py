# SPDX-License-Identifier: Apache-2.0
"""`ppd bench group`: a worker group beside vLLM's own two stages, two tensor-parallel ranks, and Theorem 4.1."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.decode.options import GroupOptions
from vllm_ppd.benchmarks.decode.run import decode
from vllm_ppd.benchmarks.decode.table import rows_of
from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender
from vllm_ppd.benchmarks.harness.estimates import number, with_quartiles
from vllm_ppd.benchmarks.harness.results import Measured, Row
from vllm_ppd.heads.calibration.tables import table as markdown
from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.io import load_config

RANKS = {"tensor_parallel_size": 2}


def run(options: GroupOptions) -> str:
    """Measure; the table."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
    layers, everyone = config.num_hidden_layers, contenders(options)
    found = decode(options, everyone, num_layers=layers, splits=splits_of(everyone, layers))
    return table(found[0], layers)


def contenders(options: GroupOptions) -> list[Contender]:
    """Two stages first and again, then a group for each number of candidates, then two tensor-parallel ranks.

    Raises:
        BenchError, HeadsError: if the heads are not early heads, or more than one folder is given.
    """
    if len(options.heads) > 1:
        raise BenchError("--heads: a worker group reads one folder of early heads")
    config: dict[str, Any] = {"method": "ppd", "num_speculative_tokens": options.micro_steps - 1}
    if options.heads:
        load_config(options.heads[0], EarlyConfig)
        config["model"] = options.heads[0]
    if options.exit_layer is not None:
        config["exit_layer"] = options.exit_layer
    cut_off = max(options.batch_sizes)
    groups = [
        Contender(f"group, k = {k}", {**config, "candidates": k, "disable_by_batch_size": cut_off})
        for k in options.candidates
    ]
    return [
        Contender(BASE),
        Contender(CONTROL),
        *groups,
        Contender("TP 2", None, {"pipeline_parallel_size": 1} | RANKS),
    ]


class Theorem(NamedTuple):
    """PPD, Theorem 4.1, divided by the tokens l: units are one layer of one token."""

    latency: float  # layers a token, one after the other: d - (d - d_bar) p (l - 1) / l
    compute: float  # layers a token in all: that, and k (d - d_bar)


def theorem(
    num_layers: int, split: int, candidates: int, match_rate: float, tokens: int | None = None, slowed: float = 1.0
) -> Theorem:
    """Expected latency and compute a token.

    Args:
        num_layers: d.
        split: d_bar, from d/2 up.
        candidates: k.
        match_rate: p_correct.
        tokens: l, of which nothing starts the first one early (None: so many that this does not count).
        slowed: what a layer takes beside the other stage's, in units of a layer alone (the paper's is 1): d - d_bar
            layers of each token run so.
    """
    late = num_layers - split
    latency = num_layers - late * match_rate * (1 if tokens is None else (tokens - 1) / tokens)
    return Theorem(latency + (slowed - 1) * late, latency + candidates * late)


class Matched(NamedTuple):
    """What a group's counters say of its candidates, beside the theorem."""

    split: int  # d_bar
    rate: float  # p_correct
    layers: float | None  # that ran for a token, candidates that were thrown away included (None: not counted)
    paper: Theorem


def matched(row: Row, num_layers: int, split: int, candidates: int, tokens: int) -> Matched | None:
    """Of a contender's row of so many tokens a request; None if its candidates started no token."""
    ours = row["ours"]
    tried = ours.get("group_hits", 0) + ours.get("group_misses", 0)
    if not tried:
        return None
    rate = ours["group_hits"] / tried
    ran = [ours[name] for name in ("group_first_stage_layers", "group_last_stage_layers") if name in ours]
    layers = sum(ran) / ours["group_tokens"] if len(ran) == 2 else None
    # The group makes all tokens but the first, which is the prompt's own.
    return Matched(split, rate, layers, theorem(num_layers, split, candidates, rate, tokens - 1))


COLUMNS = (
    "batch", "contender", "tokens/s (quartiles)", "speed-up (quartiles)", "p", "Theorem 4.1", "measured / theorem",
    "stage slowed", "measured / theorem, slowed", "layers a token", "by the theorem", "first stage idle",
    "last stage idle", "same tokens",
)  # fmt: skip

LEGEND = """\
speed-up: over vLLM's own two pipeline stages without speculation, whose turn is in the same round.
p: tokens that a candidate had started before the target chose them, of all that had candidates.
Theorem 4.1: d l / (d l - (d - d_bar) (l - 1) p), the speed-up that the paper gives for this p, l tokens and batch 1.
stage slowed: what the last stage computes a micro-step, beside the first one's work, in halves of a token's time in the
base; stages that share memory slow each other, and "theorem, slowed" is the theorem with layers that take so long.
layers a token: that ran on both stages, counted, candidates that were thrown away included; beside the theorem's.
idle: of the time in micro-steps, waiting for the other stage.
same tokens: equal to the base's at their place (greedy); "vLLM, again" is what numerics alone change."""


def table(results: Measured, num_layers: int) -> str:
    """Markdown: a row a contender and batch size."""
    run = results.run
    options = run["options"]
    lines = [
        f"{options['model']}, {num_layers} layers, {options['dtype']}, temperature {options['temperature']}, "
        f"{options['prompt_tokens']} + {options['new_tokens']} tokens; {run['machine']}{results.before}",
        "",
        body(results, num_layers),
        "",
        LEGEND,
    ]
    return "\n".join([*lines, *(f"left out: {reason}" for reason in run["failures"].values())])


def body(results: Measured, num_layers: int) -> str:
    """The table alone."""
    splits = results.run.get("splits", {})
    rows = rows_of(results)
    stages = {row["batch"]: row["batch"] / row["tokens_per_second"][0] / 2 for row in rows if row["contender"] == BASE}
    tokens = results.run["options"]["new_tokens"]
    return markdown(COLUMNS, [_cells(row, results.contenders, num_layers, splits, stages, tokens) for row in rows])


def _cells(
    row: Row, identities: dict[str, Any], num_layers: int, splits: dict[str, int], stages: dict[int, float], tokens: int
) -> list[str]:
    """Cells of a row of so many tokens; stages are the seconds of one stage's pass in the base, by batch size."""
    name, ours = row["contender"], row["ours"]
    cells = [
        str(row["batch"]),
        {BASE: "PP 2", CONTROL: "PP 2, again"}.get(name) or str(name),
        with_quartiles(row["tokens_per_second"], 1),
        with_quartiles(row["speed_up"], 3),
    ]
    same = "-" if row["consistency"] is None else f"{row['consistency']:.2%}"
    config = identities[name]["speculative_config"] or {}
    found = None if "candidates" not in config else matched(
        row, num_layers, splits.get(str(name)) or split_of(config, num_layers), config["candidates"], tokens
    )  # fmt: skip
    if found is None:
        return [*cells, *["-"] * 9, same]
    predicted = num_layers / found.paper.latency
    busy = ours["group_last_stage_seconds"] - ours["group_last_stage_idle_seconds"]
    # The last stage's time leaves each step's first micro-step out.
    slowed = busy / max(ours["group_micro_steps"] - row["drafts"] / row["batch"], 1) / stages[row["batch"]]
    late = num_layers / theorem(num_layers, found.split, config["candidates"], found.rate, tokens - 1, slowed).latency
    return [
        *cells,
        f"{found.rate:.3f}",
        f"{predicted:.3f}",
        f"{row['speed_up'][0] / predicted:.3f}",
        f"{slowed:.2f}",
        f"{row['speed_up'][0] / late:.3f}",
        number(found.layers, "{:.1f}"),
        f"{found.paper.compute:.1f}",
        *(f"{ours[f'group_{s}_stage_idle_seconds'] / ours[f'group_{s}_stage_seconds']:.0%}" for s in ("first", "last")),
        same,
    ]


def splits_of(everyone: list[Contender], num_layers: int) -> dict[str, int]:
    """Where each group's stages are split: to be kept with a run, which may outlive its heads."""
    groups = (one for one in everyone if one.speculative_config is not None)
    return {one.name: split_of(one.speculative_config or {}, num_layers) for one in groups}


def split_of(config: dict[str, Any], num_layers: int) -> int:
    """Where a contender's stages are split, as the server resolves it."""
    from vllm_ppd.vllm_plugins.config.options import parse_options
    from vllm_ppd.vllm_plugins.config.resolve import resolve

    heads = load_config(config["model"], EarlyConfig) if "model" in config else None
    return resolve(parse_options(config), num_layers, heads, stages=2).split

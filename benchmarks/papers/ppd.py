# SPDX-License-Identifier: Apache-2.0
"""PPD's tables of match rates (2, 5, 6 to 8) and what follows from them (Figs. 3 and 4); ppd_group.py has Table 3."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.decode.group import theorem
from vllm_ppd.benchmarks.papers import Curve, Measure, PaperTable, Row, Value
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.ppd_group import implementation
from vllm_ppd.benchmarks.papers.published import PPD as theirs
from vllm_ppd.benchmarks.papers.published import rates_of
from vllm_ppd.heads.early.calibration import FORMS, TOP_K, TOP_P, ExitMatches, match_exits
from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.early.module import EarlyHeads

KIND = "early"
PAPER = "PPD"
GIVEN = "given data"
HOW = (
    "Ours: the target's own greedy texts after prompts of the given data, each exit read at every generated token; a "
    "match is the target's token among the exit's k best. N reads the final norm and LM head, Y the trained head. "
    "Loops, which small models fall into, flatter match rates: see the share of repeated 4-grams."
)
BUCKETS = 8


def early_heads(context: Context) -> EarlyHeads:
    """The first folder of early heads, on the target's device."""
    calibration = context.calibration(context.heads(KIND)[0])
    config, target = calibration.config, calibration.target
    assert isinstance(config, EarlyConfig)
    heads = EarlyHeads.from_tensors(calibration.tensors, config.exit_layers, config.head)
    return heads.to(target.device, target.dtype)


def matches(context: Context, temperature: float = 0.0, **sampling: float) -> ExitMatches:
    """Every exit at every token of the texts written this way, read once for all tables."""

    def make() -> ExitMatches:
        calibration = context.calibration(context.heads(KIND)[0])
        texts = calibration.write(temperature, **sampling)
        return match_exits(
            calibration.target, early_heads(context), texts, theirs.KS, context.options.batch, calibration.autocast
        )

    return context.once(("matches", temperature, *sampling.items()), make)


def nearest(layers: Sequence[int], theirs_layer: int, num_layers: int) -> int:
    """The exit at about the same share of the model's depth as theirs."""
    return min(layers, key=lambda layer: abs(layer - theirs_layer * num_layers / theirs.DEPTH))


def middle(layers: Sequence[int], num_layers: int) -> int:
    """The exit at d/2, or the first one behind it: d_bar >= d/2.

    Raises:
        BenchError: if all exits lie before it.
    """
    behind = [layer for layer in layers if 2 * layer >= num_layers]
    if not behind:
        raise BenchError(f"no exit of these heads lies behind layer {num_layers // 2}, as PPD's Theorem 4.1 needs")
    return min(behind)


def match_rates(context: Context) -> PaperTable:
    found, depth = matches(context), context.num_layers
    exits = [nearest(found.layers, layer, depth) for layer in theirs.LAYERS]
    published = {task: rates_of(task) for task in theirs.POSITIONS}
    rows = []
    for k, (index, form) in itertools.product(theirs.KS, enumerate(FORMS)):
        rows.append(Row(f"{GIVEN}, k = {k}, {form}", [found.rate(index, layer, k) for layer in exits]))
        for task, rates in published.items():
            values = [rates[layer, k, form][-1] for layer in theirs.LAYERS]
            rows.append(Row(f"{task.removesuffix(' EN-FR')}, k = {k}, {form}", None, values))
    return PaperTable(
        "ppd-2", PAPER, "Table 2: match rate by data set, k, trained (N, Y) and layer",
        tuple(f"layer {layer} of {theirs.DEPTH}; ours {own} of {depth}"
              for layer, own in zip(theirs.LAYERS, exits, strict=True)),
        tuple(rows), f"{HOW} Ours is read at the exits nearest to the paper's relative depths.", "{:.2%}",
        _settings(context),
    )  # fmt: skip


def by_position(task: str, number: int, context: Context) -> PaperTable:
    """Tables 6 to 8: match rates by position of the token in the text, and in all."""
    found, depth, span = matches(context), context.num_layers, theirs.POSITIONS[task]
    width = span // BUCKETS
    parts = [slice(start, start + width) for start in range(0, span, width)] + [slice(0, span)]
    rows = []
    for (layer, k, form), published in rates_of(task).items():
        exit_layer = nearest(found.layers, layer, depth)
        ours: list[Value] = [
            found.rate(FORMS.index(form), exit_layer, k, part) if found.count[part].sum() else None for part in parts
        ]
        rows.append(Row(f"{layer} layers of {theirs.DEPTH} (ours {exit_layer} of {depth}), k = {k}, {form}",
                        ours, published))  # fmt: skip
    return PaperTable(
        f"ppd-{number}", PAPER, f"Table {number}: match rate by token position in {task}",
        (*(f"{part.start + 1}-{part.stop}" for part in parts[:-1]), "Total"),
        tuple(rows), f"{HOW} Ours is of the given data, not of {task}; '-' where no text is that long.", "{:.2%}",
        _settings(context),
    )  # fmt: skip


def by_decoding(context: Context) -> PaperTable:
    ways: dict[str, ExitMatches] = {
        "Greedy decoding": matches(context),
        "Top-k sampling": matches(context, 1.0, top_k=TOP_K),
        "Top-p sampling": matches(context, 1.0, top_p=TOP_P),
    }
    depth = context.num_layers
    layer = nearest(ways["Greedy decoding"].layers, theirs.DEPTH // 2, depth)
    rows = [
        Row(name, [found.rate(0, layer, 3), found.rate(1, layer, 3), None, None], [None, None, *theirs.SAMPLED[name]])
        for name, found in ways.items()
    ]
    return PaperTable(
        "ppd-5", PAPER, "Table 5: match rate of sampling based methods, k = 3",
        (f"{GIVEN}, N", f"{GIVEN}, Y", "CNN/DM", "SQUAD 1.1"), tuple(rows),
        f"{HOW} Top-k is of {TOP_K}, top-p of {TOP_P}, at temperature 1. The paper tells no layer; ours is {layer} of "
        f"{depth}. Its classifier is N.",
        "{:.2%}", _settings(context),
    )  # fmt: skip


def trade_off(number: int, context: Context) -> PaperTable:
    """Figs. 3 and 4: latency of a token over compute resources, by Theorem 4.1 for long texts."""
    found, depth = matches(context), context.num_layers
    split = middle(found.layers, depth)
    rows, curves = [], []

    def points(num_layers: int, layer: int, rates: Sequence[float]) -> list[tuple[float, float]]:
        pairs = [theorem(num_layers, layer, k, p) for k, p in zip(theirs.KS, rates, strict=True)]
        spread = [pair.latency if number == 3 else num_layers for pair in pairs]
        return [(pair.compute / unit, pair.latency / num_layers) for pair, unit in zip(pairs, spread, strict=True)]

    for index, form in enumerate(FORMS):
        trained = '+"tr"' if form == "Y" else ""
        ours = points(depth, split, [found.rate(index, split, k) for k in theirs.KS])
        curves.append(Curve(f"{GIVEN}{trained}", ours))
        for task in theirs.POSITIONS:
            rates = rates_of(task)
            published = points(theirs.DEPTH, theirs.DEPTH // 2, [rates[20, k, form][-1] for k in theirs.KS])
            curves.append(Curve(f"{task.removesuffix(' EN-FR')}{trained}", None, published))
    for curve in curves:
        for whose, values in (("ours", curve.ours), ("theirs", curve.theirs)):
            for k, point in zip(theirs.KS, values or (), strict=False):
                rows.append(Row(f"{curve.label}, k = {k}", **{"ours": None, whose: point}))
    per = "time unit" if number == 3 else "token"
    axes = (f"average compute resources per {per}", "normalized latency per token")
    return PaperTable(
        f"ppd-fig-{number}", PAPER, f"Figure {number}: trade-off of compute resources per {per} and latency per token",
        axes, tuple(rows),
        f"{HOW} Both axes follow from p_correct at the middle layer (ours {split} of {depth}, theirs 20 of 40) by "
        "Equations 3, 5 and 6, in units of ordinary decoding; theirs is computed from Table 2. k grows along a curve.",
        "{:.3f}", _settings(context), axes, tuple(curves),
    )  # fmt: skip


def _settings(context: Context) -> dict[str, Any]:
    greedy = context.calibration(context.heads(KIND)[0]).greedy
    loops = {"repeated 4-grams": round(greedy.repeated_4_grams(), 3)}
    return context.settings("prompts", "prompt_tokens", "new_tokens") | loops


TABLES: dict[str, Measure] = {
    "ppd-2": match_rates,
    "ppd-3": implementation,
    "ppd-5": by_decoding,
    "ppd-6": partial(by_position, "SQUAD", 6),
    "ppd-7": partial(by_position, "WMT EN-FR", 7),
    "ppd-8": partial(by_position, "CNN/DM", 8),
    "ppd-fig-3": partial(trade_off, 3),
    "ppd-fig-4": partial(trade_off, 4),
}

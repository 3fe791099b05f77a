# SPDX-License-Identifier: Apache-2.0
"""PPD's tables of match rates (2, 5, 6 to 8) and what follows from them (Figs. 3 and 4); ppd_group.py has Table 3."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.decode.group import theorem
from vllm_ppd.benchmarks.papers import Curve, Measure, Missing, PaperTable, Row, Value, Verdict
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.intervals import over_texts, rises
from vllm_ppd.benchmarks.papers.ppd_group import implementation
from vllm_ppd.benchmarks.papers.published import PPD as theirs
from vllm_ppd.benchmarks.papers.published import rates_of
from vllm_ppd.benchmarks.papers.tasks import COUNTERPARTS, Group, Task, groups_of
from vllm_ppd.heads.early.calibration import FORMS, TOP_K, TOP_P, ExitMatches, match_exits
from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.early.module import EarlyHeads

KIND = "early"
PAPER = "PPD"
HOW = (
    "Ours: the target's own greedy texts after the prompts of each task, each exit read at every generated token; a "
    "match is the target's token among the exit's k best. N reads the final norm and LM head, Y the trained head. "
    "Loops, which small models fall into, flatter match rates: see the share of repeated 4-grams."
)
BUCKETS = 8


def early_heads(context: Context) -> EarlyHeads:
    """The first folder of early heads, on the target's device."""
    calibration = context.calibration(context.heads(KIND)[0])
    config, target = calibration.config, calibration.target
    assert isinstance(config, EarlyConfig)
    heads = EarlyHeads.from_tensors(config, calibration.tensors)
    return heads.to(target.device, target.dtype)


def matches(context: Context, task: Task, temperature: float = 0.0, **sampling: float) -> ExitMatches:
    """Every exit at every token of the texts written this way, read once for all tables."""

    def make() -> ExitMatches:
        calibration, texts = context.calibration(context.heads(KIND)[0]), context.texts(task, temperature, **sampling)
        return match_exits(
            calibration.target, early_heads(context), texts, theirs.KS, context.options.batch, calibration.autocast
        )

    return context.once(("matches", task.name, temperature, *sampling.items()), make)


def of_group(context: Context, group: Group) -> ExitMatches:
    """Those of a group's greedy texts."""
    found = matches(context, group.task)
    return found if group.whole else found.rows(group.rows)


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
    layers, depth = early_heads(context).exit_layers, context.num_layers
    exits = [nearest(layers, layer, depth) for layer in theirs.LAYERS]
    published = {task: rates_of(task) for task in theirs.POSITIONS}
    named = {one.label: task for task in theirs.POSITIONS if (one := context.counterpart(task)) is not None}
    rows, claims = [], []
    for group, k in itertools.product(groups_of(context.tasks), theirs.KS):
        found = of_group(context, group)
        for index, form in enumerate(FORMS):
            label = f"{group.label}, k = {k}, {form}"
            rows.append(Row(label, [found.rate(index, layer, k) for layer in exits]))
        if group.whole:
            layer = middle(layers, depth)
            above = over_texts(_difference, *found.counts(1, layer, k), *found.counts(0, layer, k))
            claims.append(rises(
                "A classifier trained for the layer raises the match rate", f"{group.label}, k = {k}, layer {layer}",
                above,
            ))  # fmt: skip
    for task, rates in published.items():
        for k, form in itertools.product(theirs.KS, FORMS):
            values = [rates[layer, k, form][-1] for layer in theirs.LAYERS]
            rows.append(Row(f"{task.removesuffix(' EN-FR')}, k = {k}, {form}", None, values))
    alike = "; ".join(f"{ours} is the task of the kind of {task}" for ours, task in named.items())
    return PaperTable(
        "ppd-2", PAPER, "Table 2: match rate by data set, k, trained (N, Y) and layer",
        tuple(f"layer {layer} of {theirs.DEPTH}; ours {own} of {depth}"
              for layer, own in zip(theirs.LAYERS, exits, strict=True)),
        tuple(rows), f"{HOW} Ours is read at the exits nearest to the paper's depths." + f" {alike}." * bool(alike),
        "{:.2%}", _settings(context), claims=(*claims, *_deeper_is_better(context, exits)),
    )  # fmt: skip


def _difference(hits: Any, tokens: Any, others: Any, other_tokens: Any) -> Any:
    return hits / tokens - others / other_tokens


def _deeper_is_better(context: Context, exits: Sequence[int]) -> list[Verdict]:
    """Rates rise with k and with the layer, in every form."""
    claims = []
    for task in context.tasks:
        found, layers = matches(context, task), sorted(set(exits))
        by_k = [(f, x, ks) for f in range(len(FORMS)) for x in layers for ks in itertools.pairwise(theirs.KS)]
        falls = [(f, x, ks) for f, x, ks in by_k if found.rate(f, x, ks[1]) < found.rate(f, x, ks[0])]
        by_layer = itertools.product(range(len(FORMS)), theirs.KS, itertools.pairwise(layers))
        falling = [f"{FORMS[f]}, k = {k}, {a} to {b}" for f, k, (a, b) in by_layer
                   if found.rate(f, b, k) < found.rate(f, a, k)]  # fmt: skip
        told = f"{task.name}: it falls at {'; '.join(falling[:3])}" if falling else f"{task.name}, exits {layers}"
        claims.append(Verdict("The match rate rises with k", not falls, f"{task.name}, exits {layers}"))
        claims.append(Verdict("The match rate rises with the layer", not falling, told))
    return claims


def by_position(data_set: str, number: int, context: Context) -> PaperTable:
    """Tables 6 to 8: match rates by position of the token in the text, and in all."""
    group = context.counterpart(data_set)
    if group is None:
        raise Missing(
            f"no task stands for {data_set}: give --task {COUNTERPARTS[data_set][-1]}=FILE, or such a category"
        )
    found, depth, span = of_group(context, group), context.num_layers, theirs.POSITIONS[data_set]
    width = span // BUCKETS
    parts = [slice(start, start + width) for start in range(0, span, width)] + [slice(0, span)]
    rows = []
    for (layer, k, form), published in rates_of(data_set).items():
        exit_layer = nearest(found.layers, layer, depth)
        ours: list[Value] = [
            found.rate(FORMS.index(form), exit_layer, k, part) if found.valid[:, part].any() else None for part in parts
        ]
        rows.append(Row(f"{layer} layers of {theirs.DEPTH} (ours {exit_layer} of {depth}), k = {k}, {form}",
                        ours, published))  # fmt: skip
    return PaperTable(
        f"ppd-{number}", PAPER, f"Table {number}: match rate by token position in {data_set}",
        (*(f"{part.start + 1}-{part.stop}" for part in parts[:-1]), "Total"),
        tuple(rows), f"{HOW} Ours is of {group.label} ({len(group.rows)} prompts); '-' where no text is that long.",
        "{:.2%}", _settings(context),
    )  # fmt: skip


def by_decoding(context: Context) -> PaperTable:
    ways: dict[str, dict[str, float]] = {
        "Greedy decoding": {}, "Top-k sampling": {"temperature": 1.0, "top_k": TOP_K},
        "Top-p sampling": {"temperature": 1.0, "top_p": TOP_P},
    }  # fmt: skip
    layers, depth = early_heads(context).exit_layers, context.num_layers
    layer = nearest(layers, theirs.DEPTH // 2, depth)
    rows, claims = [], []
    for task in context.tasks:
        found = {name: matches(context, task, **way) for name, way in ways.items()}
        rows += [Row(f"{task.name}, {name}", [one.rate(0, layer, 3), one.rate(1, layer, 3), None, None])
                 for name, one in found.items()]  # fmt: skip
        for name in tuple(ways)[1:]:
            lost = over_texts(
                _difference, *found[name].counts(1, layer, 3), *found["Greedy decoding"].counts(1, layer, 3)
            )
            claims.append(Verdict(
                "Sampling keeps the match rate of greedy decoding, within 8 points", lost.above(-0.08),
                f"{task.name}, {name}, Y, layer {layer}: {lost.text('{:+.3f}')}",
            ))  # fmt: skip
    rows += [Row(name, None, [None, None, *values]) for name, values in theirs.SAMPLED.items()]
    return PaperTable(
        "ppd-5", PAPER, "Table 5: match rate of sampling based methods, k = 3", ("N", "Y", "CNN/DM", "SQUAD 1.1"),
        tuple(rows),
        f"{HOW} Top-k is of {TOP_K}, top-p of {TOP_P}, at temperature 1. The paper tells no layer; ours is {layer} of "
        f"{depth}. Its classifier is N. It loses at most 7.71 points.",
        "{:.2%}", _settings(context), claims=tuple(claims),
    )  # fmt: skip


def trade_off(number: int, context: Context) -> PaperTable:
    """Figs. 3 and 4: latency of a token over compute resources, by Theorem 4.1 for long texts."""
    depth = context.num_layers
    split = middle(early_heads(context).exit_layers, depth)
    rows, curves = [], []

    def points(num_layers: int, layer: int, rates: Sequence[float]) -> list[tuple[float, float]]:
        pairs = [theorem(num_layers, layer, k, p) for k, p in zip(theirs.KS, rates, strict=True)]
        spread = [pair.latency if number == 3 else num_layers for pair in pairs]
        return [(pair.compute / unit, pair.latency / num_layers) for pair, unit in zip(pairs, spread, strict=True)]

    for index, form in enumerate(FORMS):
        trained = '+"tr"' if form == "Y" else ""
        for task in context.tasks:
            found = matches(context, task)
            ours = points(depth, split, [found.rate(index, split, k) for k in theirs.KS])
            curves.append(Curve(f"{task.name}{trained}", ours))
        for data_set in theirs.POSITIONS:
            rates = rates_of(data_set)
            published = points(theirs.DEPTH, theirs.DEPTH // 2, [rates[20, k, form][-1] for k in theirs.KS])
            curves.append(Curve(f"{data_set.removesuffix(' EN-FR')}{trained}", None, published))
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
    return context.settings("prompts", "new_tokens") | loops(context)


def loops(context: Context) -> dict[str, str]:
    """The share of repeated 4-grams in the greedy texts of each task."""
    shares = (f"{context.texts(task).repeated_4_grams():.2f} ({task.name})" for task in context.tasks)
    return {"repeated 4-grams": ", ".join(shares)}


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

# SPDX-License-Identifier: Apache-2.0
"""PPD's tables of match rates (2, 5, 6 to 8), what follows from them (Figs. 3 and 4), and a worker group (Table 3)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.decode.group import MICRO_STEPS, STAGES, matched, split_of, theorem
from vllm_ppd.benchmarks.harness.contenders import BASE, Contender
from vllm_ppd.benchmarks.papers.context import Context, loops, once, timed
from vllm_ppd.benchmarks.papers.intervals import over_texts, rises
from vllm_ppd.benchmarks.papers.published import PPD as theirs
from vllm_ppd.benchmarks.papers.published import rates_of
from vllm_ppd.benchmarks.papers.table import Curve, Missing, PaperTable, Row, Value, Verdict, paper_table
from vllm_ppd.benchmarks.papers.tasks import COUNTERPARTS, Group, Task
from vllm_ppd.heads.early.calibration import FORMS, TOP_K, TOP_P, ExitMatches, match_exits
from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.early.module import EarlyHeads

KIND = "early"
BUCKETS = 8
DECODINGS: dict[str, dict[str, float]] = {
    "Greedy decoding": {},
    "Top-k sampling": {"temperature": 1.0, "top_k": TOP_K},
    "Top-p sampling": {"temperature": 1.0, "top_p": TOP_P},
}
CANDIDATES = (1, 3)  # of Table 3
TOKENS = 128  # of the texts of Table 3


def early_heads(context: Context) -> EarlyHeads:
    """The first folder of early heads, on the target's device."""
    calibration = context.calibration(context.heads(KIND)[0])
    config, target = calibration.config, calibration.target
    assert isinstance(config, EarlyConfig)
    heads = EarlyHeads.from_tensors(config, calibration.tensors)
    return heads.to(target.device, target.dtype)


@once
def matches(context: Context, task: Task, temperature: float = 0.0, **sampling: float) -> ExitMatches:
    """Every exit at every token of texts that were decoded so, read once for all tables."""
    calibration, texts = context.calibration(context.heads(KIND)[0]), context.texts(task, temperature, **sampling)
    batch = context.options.batch
    return match_exits(calibration.target, early_heads(context), texts, theirs.KS, batch, calibration.autocast)


def of_group(context: Context, group: Group) -> ExitMatches:
    """Those of a group's greedy texts."""
    of_task = matches(context, group.task)
    return of_task if group.whole else of_task.rows(group.rows)


def nearest(layers: Sequence[int], published: int, num_layers: int) -> int:
    """The exit at about the same share of the model's depth as a published layer."""
    return min(layers, key=lambda layer: abs(layer - published * num_layers / theirs.DEPTH))


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
    """Table 2."""
    layers, depth = early_heads(context).exit_layers, context.num_layers
    exits = [nearest(layers, layer, depth) for layer in theirs.LAYERS]
    rows, claims = [], []
    for task in context.tasks:
        for group, k, (index, form) in itertools.product(task.groups, theirs.KS, enumerate(FORMS)):
            rates = of_group(context, group)
            rows.append(Row(f"{group.label}, k = {k}, {form}", [rates.rate(index, layer, k) for layer in exits]))
        claims += _claims(task, matches(context, task), middle(layers, depth), sorted(set(exits)))
    for data_set, k, form in itertools.product(theirs.POSITIONS, theirs.KS, FORMS):
        published = [rates_of(data_set)[layer, k, form][-1] for layer in theirs.LAYERS]
        rows.append(Row(f"{data_set.removesuffix(' EN-FR')}, k = {k}, {form}", None, published))
    groups = {data_set: context.counterpart(data_set) for data_set in theirs.POSITIONS}
    alike = "; ".join(f"{group.label} is the task of the kind of {name}" for name, group in groups.items() if group)
    columns = [f"layer {layer} of {theirs.DEPTH}; ours {ours} of {depth}"
               for layer, ours in zip(theirs.LAYERS, exits, strict=True)]  # fmt: skip
    return paper_table(
        "ppd-2", rows, columns=columns, settings=_settings(context), claims=claims, alike=f" {alike}." * bool(alike)
    )


def _claims(task: Task, rates: ExitMatches, layer: int, exits: list[int]) -> list[Verdict]:
    """The trained form is better, and rates rise with k and with the layer, in every form."""
    forms, where = range(len(FORMS)), f"{task.name}, exits {exits}"
    trained = [
        rises(
            "A classifier trained for the layer raises the match rate", f"{task.name}, k = {k}, layer {layer}",
            over_texts(_difference, *rates.counts(1, layer, k), *rates.counts(0, layer, k)),
        )
        for k in theirs.KS
    ]  # fmt: skip
    by_k = itertools.product(forms, exits, itertools.pairwise(theirs.KS))
    rises_with_k = all(rates.rate(f, at, b) >= rates.rate(f, at, a) for f, at, (a, b) in by_k)
    by_layer = itertools.product(forms, theirs.KS, itertools.pairwise(exits))
    falls = [
        f"{FORMS[f]}, k = {k}, {a} to {b}" for f, k, (a, b) in by_layer if rates.rate(f, b, k) < rates.rate(f, a, k)
    ]
    falling = f"{task.name}: it falls at {'; '.join(falls[:3])}"
    return [
        *trained,
        Verdict("The match rate rises with k", rises_with_k, where),
        Verdict("The match rate rises with the layer", not falls, falling if falls else where),
    ]


def _difference(hits: Any, tokens: Any, others: Any, other_tokens: Any) -> Any:
    return hits / tokens - others / other_tokens


def by_position(data_set: str, number: int, context: Context) -> PaperTable:
    """Tables 6 to 8: match rates by position of the token in the text, and in all."""
    group = context.counterpart(data_set)
    if group is None:
        raise Missing(
            f"no task stands for {data_set}: give --task {COUNTERPARTS[data_set][-1]}=FILE, or such a category"
        )
    rates, depth, span = of_group(context, group), context.num_layers, theirs.POSITIONS[data_set]
    width = span // BUCKETS
    buckets = [slice(start, start + width) for start in range(0, span, width)]
    rows = []
    for (layer, k, form), published in rates_of(data_set).items():
        exit_layer = nearest(rates.layers, layer, depth)
        ours: list[Value] = [
            rates.rate(FORMS.index(form), exit_layer, k, bucket) if rates.valid[:, bucket].any() else None
            for bucket in (*buckets, slice(0, span))
        ]
        label = f"{layer} layers of {theirs.DEPTH} (ours {exit_layer} of {depth}), k = {k}, {form}"
        rows.append(Row(label, ours, published))
    columns = [*(f"{bucket.start + 1}-{bucket.stop}" for bucket in buckets), "Total"]
    return paper_table(
        f"ppd-{number}", rows, columns=columns, settings=_settings(context), label=group.label, prompts=len(group.rows)
    )


def by_decoding(context: Context) -> PaperTable:
    """Table 5."""
    layers, depth = early_heads(context).exit_layers, context.num_layers
    layer = nearest(layers, theirs.DEPTH // 2, depth)
    rows, claims = [], []
    for task, (name, decoding) in itertools.product(context.tasks, DECODINGS.items()):
        rates, greedy = matches(context, task, **decoding), matches(context, task)
        rows.append(Row(f"{task.name}, {name}", [rates.rate(0, layer, 3), rates.rate(1, layer, 3)]))
        if decoding:
            lost = over_texts(_difference, *rates.counts(1, layer, 3), *greedy.counts(1, layer, 3))
            claims.append(Verdict(
                "Sampling keeps the match rate of greedy decoding, within 8 points", lost.above(-0.08),
                f"{task.name}, {name}, Y, layer {layer}: {lost.text('{:+.3f}')}",
            ))  # fmt: skip
    rows += [Row(name, None, [None, None, *values]) for name, values in theirs.SAMPLED.items()]
    return paper_table(
        "ppd-5", rows, settings=_settings(context), claims=claims, top_k=TOP_K, top_p=TOP_P, layer=layer, depth=depth
    )


def trade_off(number: int, context: Context) -> PaperTable:
    """Figs. 3 and 4: latency of a token over compute resources, by Theorem 4.1 for long texts."""
    depth = context.num_layers
    split = middle(early_heads(context).exit_layers, depth)

    def points(num_layers: int, layer: int, rates: Sequence[float]) -> list[tuple[float, float]]:
        by_k = [theorem(num_layers, layer, k, p) for k, p in zip(theirs.KS, rates, strict=True)]
        units = [at.latency if number == 3 else num_layers for at in by_k]
        return [(at.compute / unit, at.latency / num_layers) for at, unit in zip(by_k, units, strict=True)]

    curves = []
    for index, form in enumerate(FORMS):
        trained = '+"tr"' if form == "Y" else ""
        for task in context.tasks:
            rates = [matches(context, task).rate(index, split, k) for k in theirs.KS]
            curves.append(Curve(f"{task.name}{trained}", points(depth, split, rates)))
        for data_set in theirs.POSITIONS:
            rates = [rates_of(data_set)[20, k, form][-1] for k in theirs.KS]
            label = f"{data_set.removesuffix(' EN-FR')}{trained}"
            curves.append(Curve(label, None, points(theirs.DEPTH, theirs.DEPTH // 2, rates)))
    rows = []
    for curve, (i, k) in itertools.product(curves, enumerate(theirs.KS)):
        ours, published = (None if line is None else line[i] for line in (curve.ours, curve.theirs))
        rows.append(Row(f"{curve.label}, k = {k}", ours, published))
    return paper_table(f"ppd-fig-{number}", rows, settings=_settings(context), curves=curves, split=split, depth=depth)


def implementation(context: Context) -> PaperTable:
    """Table 3: a worker group over two pipeline stages beside decoding without it, and beside Theorem 4.1."""
    folder, depth, tokens = context.heads(KIND)[0], context.num_layers, context.options.new_tokens
    config = {"method": "ppd", "num_speculative_tokens": MICRO_STEPS - 1, "model": folder, "disable_by_batch_size": 1}
    groups = {k: Contender(f"group, k = {k}", {**config, "candidates": k}, STAGES) for k in CANDIDATES}
    # vLLM's eager stages die on the CPU where the size of the KV cache is given: no dummy run makes their buffers.
    summaries = context.speeds([Contender(BASE, engine=STAGES), *groups.values()], eager=False)
    split = split_of({**config, "candidates": 1}, depth)
    rows = []
    for k, name in {0: BASE, **{k: group.name for k, group in groups.items()}}.items():
        if (row := summaries.get(name)) is not None:
            speed, counted = row["tokens_per_second"][0], matched(row, depth, split, k, tokens) if k else None
            beside: list[Value] = [None, None if k else 1.0, None]
            if counted is not None:
                layers = None if counted.layers is None else counted.layers / depth
                beside = [counted.paper.latency / depth, layers, counted.paper.compute / depth]
            measured = [counted and counted.rate, tokens / speed, speed, 1 / row["speed_up"][0]]
            rows.append(Row(_label(context.task.name, k), [*measured, *beside, timed(row)[1] if k else None]))
    for data_set, by_k in theirs.IMPLEMENTED.items():
        for k, (rate, latency, throughput) in by_k.items():
            paper = theorem(theirs.DEPTH, theirs.DEPTH // 2, k, rate, TOKENS) if k else None
            beside = [paper.latency / theirs.DEPTH, None, paper.compute / theirs.DEPTH] if paper else [None, 1.0]
            rows.append(Row(_label(data_set, k), None, [rate, latency, throughput, latency / by_k[0][1], *beside]))
    return paper_table(
        "ppd-3", rows, settings=context.settings("rounds", "new_tokens", "engine_dtype") | {"eager": False},
        split=split, depth=depth, tokens=tokens, micro_steps=MICRO_STEPS,
    )  # fmt: skip


def _label(task: str, k: int) -> str:
    return f"{task}, greedy (w/ PPD), k = {k}" if k else f"{task}, greedy"


def _settings(context: Context) -> dict[str, Any]:
    return context.settings("prompts", "new_tokens") | loops(context)


TABLES = {
    "ppd-2": match_rates,
    "ppd-3": implementation,
    "ppd-5": by_decoding,
    "ppd-6": partial(by_position, "SQUAD", 6),
    "ppd-7": partial(by_position, "WMT EN-FR", 7),
    "ppd-8": partial(by_position, "CNN/DM", 8),
    "ppd-fig-3": partial(trade_off, 3),
    "ppd-fig-4": partial(trade_off, 4),
}

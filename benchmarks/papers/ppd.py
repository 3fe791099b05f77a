# SPDX-License-Identifier: Apache-2.0
"""PPD's match rates by layer and k (Table 2), and a worker group beside Theorem 4.1 (Table 3)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from vllm_ppd.benchmarks.decode.group import MICRO_STEPS, STAGES, matched, split_of, theorem
from vllm_ppd.benchmarks.harness.contenders import BASE, Contender
from vllm_ppd.benchmarks.harness.estimates import bootstrap
from vllm_ppd.benchmarks.papers.context import Context, loops, once, timed
from vllm_ppd.benchmarks.papers.table import PaperTable, Row, Value, Verdict, paper_table, published, rises
from vllm_ppd.benchmarks.papers.tasks import Task
from vllm_ppd.heads.early.calibration import FORMS, ExitMatches, match_exits
from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.early.module import EarlyHeads

KIND = "early"
theirs = published("ppd")
CANDIDATES = (1, 3)  # of Table 3
TOKENS = 128  # of the texts of Table 3


def early_heads(context: Context) -> EarlyHeads:
    """The first folder of early heads, on the target's device."""
    calibration = context.calibration(context.heads(KIND)[0])
    config, target = calibration.config, calibration.target
    assert isinstance(config, EarlyConfig)
    return EarlyHeads.from_tensors(config, calibration.tensors).to(target.device, target.dtype)


@once
def matches(context: Context, task: Task) -> ExitMatches:
    """Every exit at every token of the greedy texts of a task."""
    calibration, texts = context.calibration(context.heads(KIND)[0]), context.texts(task)
    batch = context.options.batch
    return match_exits(calibration.target, early_heads(context), texts, theirs.KS, batch, calibration.autocast)


def nearest(layers: Sequence[int], theirs_at: int, num_layers: int) -> int:
    """The exit at about the same share of the model's depth as a layer of the paper."""
    return min(layers, key=lambda layer: abs(layer - theirs_at * num_layers / theirs.DEPTH))


def match_rates(context: Context) -> PaperTable:
    """Table 2."""
    layers, depth = early_heads(context).exit_layers, context.num_layers
    exits = [nearest(layers, layer, depth) for layer in theirs.LAYERS]
    # The first one from d/2 up, as Theorem 4.1 needs it, if there is any.
    middle = min((layer for layer in layers if 2 * layer >= depth), default=max(layers))
    rows, claims = [], []
    for task in context.tasks:
        rates = matches(context, task)
        for k, (index, form) in itertools.product(theirs.KS, enumerate(FORMS)):
            rows.append(Row(f"{task.name}, k = {k}, {form}", [rates.rate(index, layer, k) for layer in exits]))
        claims += _claims(task, rates, middle, sorted(set(exits)))
    rows += [Row(label, None, rates) for label, rates in theirs.MATCH.items()]
    columns = [f"layer {layer} of {theirs.DEPTH}; ours {ours} of {depth}"
               for layer, ours in zip(theirs.LAYERS, exits, strict=True)]  # fmt: skip
    return paper_table(
        "ppd-2",
        rows,
        columns=columns,
        settings=context.settings("prompts", "new_tokens") | loops(context),
        claims=claims,
    )


def _claims(task: Task, rates: ExitMatches, layer: int, exits: list[int]) -> list[Verdict]:
    """The trained form is better, and rates rise with k and with the layer, in every form."""
    trained = [
        rises(
            "A classifier trained for the layer raises the match rate", f"{task.name}, k = {k}, layer {layer}",
            bootstrap(lambda hits, tokens, a, b: hits / tokens - a / b,
                      *rates.counts(1, layer, k), *rates.counts(0, layer, k)),
        )
        for k in theirs.KS
    ]  # fmt: skip
    forms = range(len(FORMS))
    by_k = itertools.product(forms, exits, itertools.pairwise(theirs.KS))
    rises_with_k = all(rates.rate(f, at, b) >= rates.rate(f, at, a) for f, at, (a, b) in by_k)
    by_layer = itertools.product(forms, theirs.KS, itertools.pairwise(exits))
    falls = [
        f"{FORMS[f]}, k = {k}, {a} to {b}" for f, k, (a, b) in by_layer if rates.rate(f, b, k) < rates.rate(f, a, k)
    ]
    where = f"{task.name}, exits {exits}"
    falling = f"{task.name}: it falls at {'; '.join(falls[:3])}"
    return [
        *trained,
        Verdict("The match rate rises with k", rises_with_k, where),
        Verdict("The match rate rises with the layer", not falls, falling if falls else where),
    ]


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


TABLES = {"ppd-2": match_rates, "ppd-3": implementation}

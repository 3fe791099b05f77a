# SPDX-License-Identifier: Apache-2.0
"""DynaMo's table of perplexities (2) and its comparison of speed-ups (4)."""

from __future__ import annotations

from pathlib import Path

from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender
from vllm_ppd.benchmarks.harness.results import Row as Summary
from vllm_ppd.benchmarks.papers.context import Context, once, timed
from vllm_ppd.benchmarks.papers.dynamo_texts import (
    BASES,
    DEFAULT,
    TEMPERATURE,
    ablation,
    best_cell,
    config_of,
    measures_of,
    quality,
    sweep,
    text_settings,
)
from vllm_ppd.benchmarks.papers.published import DYNAMO as theirs
from vllm_ppd.benchmarks.papers.table import PaperTable, Row, Value, Verdict, paper_table

KIND = "dynamo"
SERVED_EPS_B = (0.0, 0.5)  # of the unverified engines of Table 4


def name(context: Context, folder: str) -> str:
    """Heads as the paper names its models: parameters with the heads', and tokens."""
    several = len(context.heads(KIND)) > 1
    size = _size(sum(_parameters(context, folder)))
    return f"DynaMo-{size}-T{_tokens(context, folder)}, given heads" + f" ({Path(folder).name})" * several


def _tokens(context: Context, folder: str) -> int:
    return config_of(context, folder).tokens


def _parameters(context: Context, folder: str) -> tuple[int, int]:
    """Numbers of the target and of the heads."""
    measures = measures_of(context, folder)
    target, heads = measures.target.model.parameters(), measures.heads.parameters()
    return sum(p.numel() for p in target), sum(p.numel() for p in heads)


def _size(parameters: int) -> str:
    unit, letter = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{parameters / unit:.{0 if parameters >= 10 * unit else 1}f}{letter}"


def suite(context: Context) -> PaperTable:
    """Table 2."""
    rows, claims, counts = [], [], {}
    for task in context.tasks:
        windows = context.windows(task)
        counts[task.name] = f"{sum(int(window.ahead(1)[1].sum()) for window in windows)} tokens"
        for folder in context.heads(KIND):
            values, label = measures_of(context, folder).perplexities(windows), f"{name(context, folder)}, {task.name}"
            alone, joint = ([*values[key], None, None][:3] for key in ("ppl_n", "ppl_1:n"))
            if folder == context.heads(KIND)[0]:
                rows.append(Row(f"given model, {task.name}", alone[:1]))
            rows.append(Row(label, [*alone, *joint[1:]]))
            known = [value for value in alone if value is not None]
            evidence = f"{label}: {', '.join(f'{value:.1f}' for value in known)}"
            claims.append(Verdict("Each further token is harder to predict", known == sorted(known), evidence))
    rows += [Row(label, None, values) for label, values in theirs.SUITE.items()]
    return paper_table("dynamo-2", rows, settings=counts, claims=claims)


@once
def engines(context: Context) -> dict[str, Summary]:
    """Everyone of Table 4, sampling, one request at a time; who failed to start is missing."""
    contenders = [Contender(BASE), Contender(CONTROL)]
    for folder in context.heads(KIND):
        drafts = {"num_speculative_tokens": _tokens(context, folder) - 1, "adaptive": False}
        config = {"method": "dynamo", "model": folder, **drafts}
        label = name(context, folder)
        contenders.append(Contender(f"{label}, verified", config))
        for eps in SERVED_EPS_B:
            contenders.append(Contender(_unverified(label, eps), {**config, "verify": False, "eps_b": eps}))
    return context.speeds(contenders, temperature=TEMPERATURE)


def _unverified(label: str, eps_b: float) -> str:
    return f"{label}, unverified, eps_b = {eps_b:g}"


def baselines(context: Context) -> PaperTable:
    """Table 4."""
    summaries, rows = engines(context), []
    for folder in context.heads(KIND):
        label = name(context, folder)
        costs: list[Value] = [_size(_parameters(context, folder)[0]), *_overhead(context, folder)]
        best = best_cell(quality(context, folder, DEFAULT))
        rows.append(Row(f"{label}, same quality", [*costs, best]))
        for point in (point for point in sweep(context, folder, DEFAULT) if point.eps_b in SERVED_EPS_B):
            served = _unverified(label, point.eps_b)
            rows.append(Row(served, [*costs, f"{point.speed_up:.2f}x", *timed(summaries.get(served))]))
        rows.append(Row(f"{label}, verified", [*costs, None, *timed(summaries.get(f"{label}, verified"))]))
    rows.append(Row("vLLM, again", [None, None, None, None, *timed(summaries.get(CONTROL))]))
    for label, (size, flops, speed_up) in theirs.BASELINES.items():
        published = speed_up if isinstance(speed_up, str) else f"{speed_up:.2f}x"
        rows.append(Row(label, None, [size, flops, None, published]))
    return paper_table(
        "dynamo-4", rows, settings=text_settings(context) | context.settings("rounds", "engine_dtype", "eager"),
        bases=BASES, temperature=TEMPERATURE,
    )  # fmt: skip


def _overhead(context: Context, folder: str) -> list[float]:
    """The heads' parameters in units of the target's; their products, reads of the LM head included, likewise."""
    target, heads = _parameters(context, folder)
    model = measures_of(context, folder).target
    read = model.unembedding.numel()
    layers = sum(p.numel() for p in model.layers.parameters())
    return [heads / target, (heads + (_tokens(context, folder) - 1) * read) / (layers + read)]


TABLES = {
    "dynamo-2": suite,
    "dynamo-4": baselines,
    "dynamo-fig-12": ablation,
}

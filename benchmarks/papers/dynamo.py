# SPDX-License-Identifier: Apache-2.0
"""DynaMo's tables of perplexities (2 and 10), its comparison of speed-ups (4), and dynamic perplexity (Fig. 15)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender
from vllm_ppd.benchmarks.harness.results import Row as Summary
from vllm_ppd.benchmarks.papers.context import Context, once, timed
from vllm_ppd.benchmarks.papers.dynamo_texts import (
    BASES,
    DEFAULT,
    EPS_B,
    TEMPERATURE,
    ablation,
    best_cell,
    config_of,
    measures_of,
    quality,
    shares,
    sweep,
    text_settings,
)
from vllm_ppd.benchmarks.papers.published import DYNAMO as theirs
from vllm_ppd.benchmarks.papers.table import Curve, PaperTable, Row, Value, Verdict, paper_table
from vllm_ppd.benchmarks.papers.tasks import Task
from vllm_ppd.heads.dynamo.config import DynaMoOptions
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.training.provenance import provenance_of

KIND = "dynamo"
DYNAMIC_TOKENS = 4096  # of the data, for Fig. 15
SERVED_EPS_B = (0.0, 0.5)  # unverified engines of Table 4


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


@once
def perplexities(context: Context, folder: str, task: Task) -> list[Value]:
    """PPL_1 to PPL_3, PPL_1:2 and PPL_1:3 of heads on a task; None beyond the heads' tokens."""
    values = measures_of(context, folder).perplexities(context.windows(task))
    alone, joint = ([*values[key], None, None][:3] for key in ("ppl_n", "ppl_1:n"))
    return [*alone, *joint[1:]]


def suite(context: Context) -> PaperTable:
    """Table 2."""
    rows, claims = [], []
    folders = context.heads(KIND)
    for task in context.tasks:
        rows.append(Row(f"given model, {task.name}", perplexities(context, folders[0], task)[:1]))
        for folder in folders:
            values, label = perplexities(context, folder, task), f"{name(context, folder)}, {task.name}"
            rows.append(Row(label, values))
            known = [value for value in values[:3] if isinstance(value, float)]
            evidence = f"{label}: {', '.join(f'{value:.1f}' for value in known)}"
            claims.append(Verdict("Each further token is harder to predict", known == sorted(known), evidence))
    return _perplexities(context, "dynamo-2", rows, theirs.SUITE, claims=claims)


def architectures(context: Context) -> PaperTable:
    """Table 10."""
    folders, task = context.heads(KIND), context.task
    rows = [Row(f"given model, {task.name}", perplexities(context, folders[0], task)[:1])]
    for folder in folders:
        values, label = perplexities(context, folder, task), name(context, folder) + recipe_of(folder)
        if _tokens(context, folder) > 2:
            rows.append(Row(f"{label}, without head 3", [*values[:2], None, values[3]]))
        rows.append(Row(label, values))
    return _perplexities(context, "dynamo-10", rows, theirs.ARCHITECTURES, task=task.name)


def recipe_of(folder: str) -> str:
    """How heads were trained, in the paper's letters where it has that setting, from their provenance."""
    try:
        options = provenance_of(folder).options
    except HeadsError:
        return ""
    letters = ["H"] if options.get("recipe") == "heads" else []
    if options.get("distillation"):
        letters.append("distilled")
    if options.get("start") == "copy":
        low = DynaMoOptions.model_fields["base_learning_rate"].default
        rate, base = options.get("learning_rate"), options.get("base_learning_rate", low)
        letters.append("C" if rate is not None and rate <= base else "copied")
    return f" ({', '.join(letters)})" if letters else ""


def _perplexities(context: Context, key: str, rows: list[Row], published: Mapping[str, Any], **more: Any) -> PaperTable:
    rows += [Row(label, None, values) for label, values in published.items()]
    counts = {
        task.name: f"{sum(int(b.ahead(1)[1].sum()) for b in context.windows(task))} tokens" for task in context.tasks
    }
    return paper_table(key, rows, settings=counts, **more)


def dynamic(context: Context) -> PaperTable:
    """Fig. 15."""
    rows, curves, task = [], [], context.task
    for folder in context.heads(KIND):
        windows, label = context.windows(task)[0], name(context, folder)
        few = max(1, DYNAMIC_TOKENS // windows.input_ids.shape[1])
        batch = windows.chosen(range(min(few, len(windows.input_ids))))
        points = measures_of(context, folder).dynamic_perplexity([batch], config_of(context, folder).sampling, EPS_B)
        rows += [Row(f"{label}, eps_b = {p['eps_b']:g}", [p["ppl_d"], p["tokens_a_pass"]]) for p in points]
        curves.append(Curve(label, [(p["tokens_a_pass"], p["ppl_d"]) for p in points]))
    for label, (first, _, _, _, joint) in theirs.SUITE.items():
        if joint is not None:
            rows += [
                Row(f"{label}, eps_b = 0", None, [joint, 3.0]),
                Row(f"{label}, eps_b = 1", None, [first, 1.0]),
            ]
            curves.append(Curve(label, None, [(3.0, joint), (1.0, first)]))
    return paper_table("dynamo-fig-15", rows, curves=curves, settings={"tokens": DYNAMIC_TOKENS}, task=task.name)


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
        best = best_cell(quality(context, folder, DEFAULT, EPS_B))
        rows.append(Row(f"{label}, same quality", [*costs, best]))
        for point in sweep(context, folder, DEFAULT, SERVED_EPS_B):
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
    "dynamo-10": architectures,
    "dynamo-fig-5": shares,
    "dynamo-fig-12": ablation,
    "dynamo-fig-15": dynamic,
}

# SPDX-License-Identifier: Apache-2.0
"""DynaMo's tables of perplexities (2 and 10), its comparison of speed-ups (4), and dynamic perplexity (Fig. 15)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender
from vllm_ppd.benchmarks.harness.results import Row as Summary
from vllm_ppd.benchmarks.papers import Curve, Measure, PaperTable, Row, Value, Verdict
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.dynamo_quality import (
    DEFAULT,
    EPS_B,
    JUDGE,
    PAPER,
    TEMPERATURE,
    ablation,
    measures_of,
    quality,
    shares,
    sweep,
    text_settings,
)
from vllm_ppd.benchmarks.papers.published import DYNAMO as theirs
from vllm_ppd.benchmarks.papers.tasks import Task
from vllm_ppd.heads.dynamo.config import DynaMoConfig, DynaMoOptions
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.training.provenance import provenance_of

KIND = "dynamo"
GIVEN = "given model"
COLUMNS = ("PPL_1", "PPL_2", "PPL_3", "PPL_1:2", "PPL_1:3")
DYNAMIC_TOKENS = 4096  # of the data, for Fig. 15
SERVED_EPS_B = (0.0, 0.5)  # unverified engines of Table 4
HOW = (
    "Ours: teacher-forced on a task's texts, or on the answers that the target samples; PPL_n of each head and PPL_1:n "
    "of the product of independent heads (eq. 4). The +- of the paper are left out."
)


def name(context: Context, folder: str) -> str:
    """As the paper names its models: parameters with the heads', and tokens."""
    several = len(context.heads(KIND)) > 1
    size = _size(sum(_parameters(context, folder)))
    return f"DynaMo-{size}-T{_tokens(context, folder)}, given heads" + f" ({Path(folder).name})" * several


def _tokens(context: Context, folder: str) -> int:
    config = context.calibration(folder).config
    assert isinstance(config, DynaMoConfig)
    return config.tokens


def _parameters(context: Context, folder: str) -> tuple[int, int]:
    """Of the target and of the heads."""
    measures = measures_of(context, folder)
    target, heads = measures.target.model.parameters(), measures.heads.parameters()
    return sum(p.numel() for p in target), sum(p.numel() for p in heads)


def _size(parameters: int) -> str:
    unit, letter = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{parameters / unit:.{0 if parameters >= 10 * unit else 1}f}{letter}"


def perplexities(context: Context, folder: str, task: Task) -> list[Value]:
    """Of heads on a task, by the names of COLUMNS; None beyond the heads' tokens."""

    def make() -> list[Value]:
        found = measures_of(context, folder).perplexities(context.windows(task))
        alone, joint = ([*found[key], None, None][:3] for key in ("ppl_n", "ppl_1:n"))
        return [*alone, *joint[1:]]

    return context.once(("dynamo perplexities", folder, task.name), make)


def suite(context: Context) -> PaperTable:
    rows, claims = [], []
    folders = context.heads(KIND)
    for task in context.tasks:
        rows.append(Row(f"{GIVEN}, {task.name}", [perplexities(context, folders[0], task)[0], *[None] * 4]))
        for folder in folders:
            values = perplexities(context, folder, task)
            rows.append(Row(f"{name(context, folder)}, {task.name}", values))
            known = [value for value in values[:3] if isinstance(value, float)]
            told = f"{name(context, folder)}, {task.name}: {', '.join(f'{value:.1f}' for value in known)}"
            claims.append(Verdict("Each further token is harder to predict", known == sorted(known), told))
    return _perplexities(context, 2, "multi-token perplexity results", rows, theirs.SUITE, "Theirs: the Pile.", claims)


def architectures(context: Context) -> PaperTable:
    folders, rows, task = context.heads(KIND), [], context.task
    rows.append(Row(f"{GIVEN}, {task.name}", [perplexities(context, folders[0], task)[0], *[None] * 4]))
    for folder in folders:
        values, form = perplexities(context, folder, task), recipe_of(folder)
        if _tokens(context, folder) > 2:
            rows.append(Row(f"{name(context, folder)}{form}, without head 3",
                            [*values[:2], None, values[3], None]))  # fmt: skip
        rows.append(Row(f"{name(context, folder)}{form}", values))
    return _perplexities(
        context, 10, "multi-token perplexity results for various architectural variations", rows,
        theirs.ARCHITECTURES,
        f"Ours: {task.name}. (H): the token heads alone are trained, as in DynaMo-74M-T2-H; (C): they start as copies "
        "of the last layer and are trained at the base model's low rate; copied: they start so and are trained at the "
        "heads' own rate, which is no setting of the paper. Heads that are trained apart on a frozen model are the "
        "same with fewer tokens. Other variations have no counterpart here. Theirs: the Pile, Pythia-70M.", [],
    )  # fmt: skip


def recipe_of(folder: str) -> str:
    """How heads were trained, in the paper's letters where it has that setting, from their provenance."""
    try:
        options = provenance_of(folder).options
    except HeadsError:
        return ""
    said = ["H"] if options.get("recipe") == "heads" else []
    if options.get("distillation"):
        said.append("distilled")
    if options.get("start") == "copy":
        low = DynaMoOptions.model_fields["base_learning_rate"].default
        rate, base = options.get("learning_rate"), options.get("base_learning_rate", low)
        said.append("C" if rate is not None and rate <= base else "copied")
    return f" ({', '.join(said)})" if said else ""


def _perplexities(
    context: Context, number: int, what: str, rows: list[Row], published: Mapping[str, Any], further: str,
    claims: list[Verdict],
) -> PaperTable:  # fmt: skip
    rows += [Row(label, None, values) for label, values in published.items()]
    read = {
        task.name: f"{sum(int(b.ahead(1)[1].sum()) for b in context.windows(task))} tokens" for task in context.tasks
    }
    return PaperTable(
        f"dynamo-{number}", PAPER, f"Table {number}: {what}", COLUMNS, tuple(rows), f"{HOW} {further}", "{:.1f}", read,
        claims=tuple(claims),
    )  # fmt: skip


def dynamic(context: Context) -> PaperTable:
    rows, curves, task = [], [], context.task
    for folder in context.heads(KIND):
        config, windows = context.calibration(folder).config, context.windows(task)[0]
        assert isinstance(config, DynaMoConfig)
        few = max(1, DYNAMIC_TOKENS // windows.input_ids.shape[1])
        batch = windows.part(range(min(few, len(windows.input_ids))))
        found = measures_of(context, folder).dynamic_perplexity([batch], config.sampling, EPS_B)
        label = name(context, folder)
        rows += [Row(f"{label}, eps_b = {p['eps_b']:g}", [p["ppl_d"], p["tokens_a_pass"]]) for p in found]
        curves.append(Curve(label, [(p["tokens_a_pass"], p["ppl_d"]) for p in found]))
    for label, values in theirs.SUITE.items():
        if values[4] is not None and values[0] is not None:
            rows += [
                Row(f"{label}, eps_b = 0", None, [values[4], 3.0]),
                Row(f"{label}, eps_b = 1", None, [values[0], 1.0]),
            ]
            curves.append(Curve(label, None, [(3.0, values[4]), (1.0, values[0])]))
    return PaperTable(
        "dynamo-fig-15", PAPER, "Figure 15: dynamic multi-token perplexity; effect of eps_b on (a) PPL_d and (b) "
        "speed-up, (c) PPL_d vs. speed-up",
        ("(a) PPL_d", "(b) speed-up"), tuple(rows),
        f"Ours: along {task.name}, as many tokens at a time as Algorithm 1 takes; speed-up is tokens a pass. Theirs: "
        "the figure is drawn without numbers; its ends are Table 2's PPL_1 (eps_b 1 takes one token) and PPL_1:3 "
        "(eps_b 0 takes three).",
        ("{:.1f}", "{:.2f}x"), {"tokens": DYNAMIC_TOKENS}, ("speed-up", "PPL_d"), tuple(curves),
    )  # fmt: skip


def engines(context: Context) -> dict[str, Summary]:
    """Everyone of Table 4, sampling, one request at a time; who failed to start is missing."""

    def make() -> dict[str, Summary]:
        everyone = [Contender(BASE), Contender(CONTROL)]
        for folder in context.heads(KIND):
            drafts = {"num_speculative_tokens": _tokens(context, folder) - 1, "adaptive": False}
            config = {"method": "dynamo", "model": folder, **drafts}
            label = name(context, folder)
            everyone.append(Contender(f"{label}, verified", config))
            everyone += [
                Contender(_unverified(label, eps), {**config, "verify": False, "eps_b": eps}) for eps in SERVED_EPS_B
            ]
        return {who: row for (who, _), row in context.speeds(everyone, temperature=TEMPERATURE).items()}

    return context.once("dynamo engines", make)


def _unverified(label: str, eps_b: float) -> str:
    return f"{label}, unverified, eps_b = {eps_b:g}"


def baselines(context: Context) -> PaperTable:
    found, rows = engines(context), []

    def timed(who: str) -> list[Value]:
        row = found.get(who)
        return [None, None] if row is None else [row["speed_up"][0], context.quartiles(row)]

    for folder in context.heads(KIND):
        label, overhead = name(context, folder), _overhead(context, folder)
        size = _size(_parameters(context, folder)[0])
        same = quality(context, folder, DEFAULT, EPS_B)
        best = "none" if same is None else f"{same.speed_up:.2f}x" + "*" * same.extrapolated
        rows.append(Row(f"{label}, same quality", [size, *overhead, best, None, None]))
        for point in sweep(context, folder, DEFAULT, SERVED_EPS_B):
            who = _unverified(label, point.eps_b)
            rows.append(Row(who, [size, *overhead, f"{point.speed_up:.2f}x", *timed(who)]))
        rows.append(Row(f"{label}, verified", [size, *overhead, None, *timed(f"{label}, verified")]))
    rows.append(Row("vLLM, again", [None, None, None, None, *timed(CONTROL)]))
    rows += [
        Row(label, None, [size, flops, None, gain if isinstance(gain, str) else f"{gain:.2f}x", None, None])
        for label, (size, flops, gain) in theirs.BASELINES.items()
    ]
    return PaperTable(
        "dynamo-4", PAPER, "Table 4: comparisons with other approaches",
        ("Base Model Size", "FLOPS Overhead", "with the heads' reads of the LM head", "Speed-up", "Speed-up in vLLM",
         "quartiles"),
        tuple(rows),
        "Overhead, as the paper counts it: the heads' parameters beside the base model's. Speed-up: tokens a pass of "
        "Algorithm 1; same quality is where the regression of the win rate over it is 1 (none: nowhere; *: beyond what "
        f"was measured), theirs by GPT-3.5. {JUDGE} Speed-up in vLLM: engines in turns, one request at a time, "
        f"temperature {TEMPERATURE}, with the heads' own settings. Verified n-grams keep the base's own distribution; "
        "unverified ones do not. Beside a small model the joint of k^n entries is dear.",
        ("{}", "{:.2%}", "{:.2%}", "{}", "{:.3f}x", "{}"),
        text_settings(context) | context.settings("rounds", "engine_dtype", "eager"),
    )  # fmt: skip


def _overhead(context: Context, folder: str) -> list[float]:
    """The heads' parameters in units of the target's; their products, reads of the LM head included, in its own."""
    target, heads = _parameters(context, folder)
    model = measures_of(context, folder).target
    read = model.unembedding.numel()
    layers = sum(p.numel() for p in model.layers.parameters())
    return [heads / target, (heads + (_tokens(context, folder) - 1) * read) / (layers + read)]


TABLES: dict[str, Measure] = {
    "dynamo-2": suite,
    "dynamo-4": baselines,
    "dynamo-10": architectures,
    "dynamo-fig-5": shares,
    "dynamo-fig-12": ablation,
    "dynamo-fig-15": dynamic,
}

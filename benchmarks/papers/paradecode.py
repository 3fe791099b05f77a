# SPDX-License-Identifier: Apache-2.0
"""ParaDecode's tables of speed-ups, trained and not, and consistency (1 to 3), and Fig. 6 over gamma."""

from __future__ import annotations

from typing import Any

from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender
from vllm_ppd.benchmarks.harness.results import Row as Summary
from vllm_ppd.benchmarks.papers.context import Context, once, timed
from vllm_ppd.benchmarks.papers.ppd import early_heads
from vllm_ppd.benchmarks.papers.table import PaperTable, Row, Verdict, paper_table, published
from vllm_ppd.benchmarks.papers.tasks import Task

KIND = "early"
theirs = published("paradecode")
DRAFTER = "SpecDecode, given model w/ given drafter"
OURS = "ParaDecode (Ours), given model"
PARALLEL = "ParaDecode (Ours), given model, layer-parallel schedule"
UNTRAINED = "w/o lightweight LM head training"
SETTINGS = ("rounds", "new_tokens", "engine_dtype", "eager")


@once
def engines(context: Context, task: Task) -> dict[str, Summary]:
    """Everyone of the tables, one request at a time; who failed to start is missing."""
    config = drafting(context)
    contenders = [
        Contender(BASE),
        Contender(CONTROL),
        Contender(OURS, config),
        Contender(PARALLEL, {**config, "schedule": "parallel"}),
        Contender(UNTRAINED, {name: value for name, value in config.items() if name != "model"}),
    ]
    if context.options.draft_model is not None:
        drafts = {"method": "draft_model", "model": context.options.draft_model}
        contenders.append(Contender(DRAFTER, {**drafts, "num_speculative_tokens": context.options.drafts}))
    return context.speeds(contenders, task=task)


def drafting(context: Context) -> dict[str, Any]:
    """The paper's setting: every draft is made (gamma 0), always as many."""
    return {
        "method": "paradecode", "model": context.heads(KIND)[0], "exit_layer": exit_layer(context), "adaptive": False,
        "num_speculative_tokens": context.options.drafts,
    }  # fmt: skip


def exit_layer(context: Context) -> int:
    """The exit asked for, or the one nearest to the middle."""
    wanted = context.options.exit_layer or context.num_layers / 2
    return min(early_heads(context).exit_layers, key=lambda layer: abs(layer - wanted))


def speedups(context: Context) -> PaperTable:
    """Table 1, and of Table 3 what training the head gains."""
    by_task = {task.name: engines(context, task) for task in context.tasks}
    claims = []
    for task, rows in by_task.items():
        if OURS in rows:
            median, low, high = rows[OURS]["speed_up"]
            claims.append(Verdict(
                "ParaDecode is faster than autoregressive decoding", True if low > 1 else False if high < 1 else None,
                f"{task}: {median:.3f}x, quartiles {low:.2f} to {high:.2f}",
            ))  # fmt: skip
        if {OURS, UNTRAINED} <= rows.keys():  # Table 3
            trained, plain = rows[OURS]["speed_up"][0], rows[UNTRAINED]["speed_up"][0]
            evidence = f"{task}: {plain:.3f}x untrained, {trained:.3f}x trained"
            claims += [
                Verdict("Without training the head, drafting is slower than ordinary decoding", plain < 1, evidence),
                Verdict("Training the head makes drafting faster", trained > plain, evidence),
            ]
    cells = {
        task: {name: "{:.3f}x ({})".format(*timed(row)) for name, row in rows.items()} for task, rows in by_task.items()
    }
    return _by_task(context, "paradecode-1", cells, theirs.SPEEDUPS, claims)


def consistency(context: Context) -> PaperTable:
    """Table 2."""
    equal = {
        task.name: {name: row["consistency"] for name, row in engines(context, task).items()} for task in context.tasks
    }
    claims = [
        Verdict("Output equals ordinary decoding's as often as numerics allow", ours[OURS] >= ours[CONTROL] - 0.05,
                f"{task}: {ours[OURS]:.2%}, and vLLM against itself {ours[CONTROL]:.2%}")
        for task, ours in equal.items() if {OURS, CONTROL} <= ours.keys()
    ]  # fmt: skip
    cells = {task: {name: f"{share:.2%}" for name, share in ours.items()} for task, ours in equal.items()}
    return _by_task(context, "paradecode-2", cells, theirs.CONSISTENCY, claims)


def _by_task(
    context: Context, key: str, cells: dict[str, dict[str, str]], by_paper: dict[str, Any], claims: list[Verdict]
) -> PaperTable:
    """A column a task of ours and of theirs; cells by task and contender."""
    rows = [Row(label, None, [*[None] * len(cells), *values]) for label, values in by_paper.items()]
    for label in (DRAFTER, OURS, PARALLEL, UNTRAINED, CONTROL):
        if any(label in ours for ours in cells.values()):
            rows.append(Row(label, [ours.get(label) for ours in cells.values()]))
    return paper_table(
        key, rows, columns=(*cells, *theirs.TASKS), settings=context.settings(*SETTINGS), claims=claims,
        dtype=context.options.engine_dtype, **_facts(context),
    )  # fmt: skip


def threshold(context: Context) -> PaperTable:
    """Fig. 6."""
    task, config = context.task, drafting(context)
    names = {gamma: f"paradecode, gamma {gamma:g}" for gamma in theirs.GAMMAS if gamma < 1}
    drafting_with = [Contender(name, {**config, "gamma": gamma}) for gamma, name in names.items()]
    summaries = context.speeds([Contender(BASE), Contender(CONTROL), *drafting_with], task=task)
    rejected = {
        gamma: 1 - summaries[name]["rate"] for gamma, name in names.items()
        if name in summaries and summaries[name]["rate"] is not None
    }  # fmt: skip
    rows = []
    for gamma in theirs.GAMMAS:
        speed_up, quartiles = timed(summaries.get(names.get(gamma, CONTROL)))
        rows.append(Row(f"gamma = {gamma:g}", [speed_up, rejected.get(gamma), quartiles], theirs.THRESHOLD.get(gamma)))
    best = max((summaries[name]["speed_up"][0], gamma) for gamma, name in names.items() if name in summaries)
    shares = list(rejected.values())
    evidence = f"{task.name}: {', '.join(f'{share:.1%} at {gamma:g}' for gamma, share in rejected.items())}"
    claims = [
        Verdict("gamma 0 is the fastest", best[1] == 0, f"{task.name}: {best[0]:.3f}x at gamma {best[1]:g}"),
        Verdict("A higher gamma rejects fewer of them", shares == sorted(shares, reverse=True), evidence),
        Verdict("Around 30 % are rejected at gamma 0", 0.2 <= rejected.get(0.0, 1.0) <= 0.4, evidence),
    ]
    settings = context.settings(*SETTINGS)
    return paper_table("paradecode-fig-6", rows, settings=settings, claims=claims, task=task.name, **_facts(context))


def _facts(context: Context) -> dict[str, Any]:
    return {"layer": exit_layer(context), "depth": context.num_layers, "drafts": context.options.drafts}


TABLES = {
    "paradecode-1": speedups,
    "paradecode-2": consistency,
    "paradecode-fig-6": threshold,
}

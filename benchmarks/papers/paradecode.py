# SPDX-License-Identifier: Apache-2.0
"""ParaDecode's tables of speed-ups and consistency (1 and 2), its ablation (3), and Fig. 6 over gamma."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender
from vllm_ppd.benchmarks.harness.results import Row as Summary
from vllm_ppd.benchmarks.papers import Curve, Measure, PaperTable, Row, Value, Verdict
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.paradecode_texts import predictions, unverified
from vllm_ppd.benchmarks.papers.ppd import early_heads
from vllm_ppd.benchmarks.papers.published import PARADECODE as theirs
from vllm_ppd.benchmarks.papers.tasks import Task
from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.io import load_config

KIND = "early"
PAPER = "ParaDecode"
DRAFTER = "SpecDecode, given model w/ given drafter"
OURS = "ParaDecode (Ours), given model"
PARALLEL = "ParaDecode (Ours), given model, layer-parallel schedule"
UNTRAINED = "w/o lightweight LM head training"
SETTINGS = ("rounds", "new_tokens", "engine_dtype", "eager")


def engines(context: Context, task: Task) -> dict[str, Summary]:
    """Everyone of Tables 1 to 3, one request at a time; who failed to start is missing."""

    def make() -> dict[str, Summary]:
        config = drafting(context)
        everyone = [
            Contender(BASE),
            Contender(CONTROL),
            Contender(OURS, config),
            Contender(PARALLEL, {**config, "schedule": "parallel"}),
            Contender(UNTRAINED, {name: value for name, value in config.items() if name != "model"}),
        ]
        if context.options.draft_model is not None:
            drafts = {"method": "draft_model", "model": context.options.draft_model}
            everyone.append(Contender(DRAFTER, {**drafts, "num_speculative_tokens": context.options.drafts}))
        return {name: row for (name, _), row in context.speeds(everyone, task=task).items()}

    return context.once(("paradecode engines", task.name), make)


def drafting(context: Context) -> dict[str, Any]:
    """The paper's setting: every draft is made (gamma 0), always as many."""
    return {
        "method": "paradecode", "model": context.heads(KIND)[0], "exit_layer": exit_layer(context), "adaptive": False,
        "num_speculative_tokens": context.options.drafts,
    }  # fmt: skip


def exit_layer(context: Context) -> int:
    """The exit asked for, or the one nearest to the middle."""
    config = load_config(context.heads(KIND)[0], EarlyConfig)
    wanted = context.options.exit_layer or context.num_layers / 2
    return min(config.exit_layers, key=lambda layer: abs(layer - wanted))


def speedups(context: Context) -> PaperTable:
    found = {task.name: engines(context, task) for task in context.tasks}
    claims = []
    for name, rows in found.items():
        if OURS in rows:
            _, low, high = rows[OURS]["speed_up"]
            told = f"{name}: {rows[OURS]['speed_up'][0]:.3f}x, quartiles {low:.2f} to {high:.2f}"
            claims.append(Verdict("ParaDecode is faster than autoregressive decoding", _side(low, high, 1.0), told))
    return _by_task(
        context, 1, "speed-up over vanilla autoregressive decoding", theirs.SPEEDUPS, found,
        lambda row: f"{row['speed_up'][0]:.3f}x ({Context.quartiles(row)})", "{:.3f}x",
        "Quartiles in brackets; vLLM alone once more in the same turns is what noise is.", claims,
    )  # fmt: skip


def _side(low: float, high: float, of: float) -> bool | None:
    return True if low > of else False if high < of else None


def consistency(context: Context) -> PaperTable:
    found = {task.name: engines(context, task) for task in context.tasks}
    claims = [
        Verdict(
            "Output equals ordinary decoding's as often as numerics allow",
            rows[OURS]["consistency"] >= rows[CONTROL]["consistency"] - 0.05,
            f"{name}: {rows[OURS]['consistency']:.2%}, and vLLM against itself {rows[CONTROL]['consistency']:.2%}",
        )
        for name, rows in found.items() if OURS in rows and CONTROL in rows
    ]  # fmt: skip
    return _by_task(
        context, 2, "consistency ratio", theirs.CONSISTENCY, found, lambda row: f"{row['consistency']:.2%}", "{:.2%}",
        f"A token counts if it equals vLLM's own at its place, in {context.options.engine_dtype}; vLLM against itself "
        "is what numerics alone change.", claims,
    )  # fmt: skip


def _by_task(
    context: Context, number: int, what: str, published: Mapping[str, Sequence[float]],
    found: Mapping[str, Mapping[str, Summary]], cell: Callable[[Summary], str], form: str, further: str,
    claims: list[Verdict],
) -> PaperTable:  # fmt: skip
    """A column a task of ours and of theirs."""
    nothing: list[Value] = [None] * len(found)
    rows = [Row(label, None, [*nothing, *values]) for label, values in published.items()]
    for label in (DRAFTER, OURS, PARALLEL, UNTRAINED, CONTROL):
        if any(label in own for own in found.values()):
            ours = [cell(own[label]) if label in own else None for own in found.values()]
            rows.append(Row(label, [*ours, *[None] * len(theirs.TASKS)]))
    return PaperTable(
        f"paradecode-{number}", PAPER, f"Table {number}: {what}", (*found, *theirs.TASKS), tuple(rows),
        f"{_how(context)} Self-SpecDecode is no method of vLLM. {further}", form, context.settings(*SETTINGS),
        claims=tuple(claims),
    )  # fmt: skip


def ablation(context: Context) -> PaperTable:
    task, folder = code_task(context), context.heads(KIND)[0]
    found, calibration, layer = engines(context, task), context.calibration(folder), exit_layer(context)
    alone = unverified(calibration, early_heads(context), context.texts(task), layer)
    ours: dict[str, list[Value]] = {"w/o verification step": [alone, None, None]}
    for label, name in (("ParaDecode", OURS), (UNTRAINED, UNTRAINED)):
        row = found.get(name)
        ours[label] = [None] * 3 if row is None else [row["consistency"], row["speed_up"][0], context.quartiles(row)]
    claims = [Verdict("Without verification the text is another", alone < 0.9, f"{task.name}: {alone:.2%} of tokens")]
    if OURS in found and UNTRAINED in found:
        trained, plain = found[OURS]["speed_up"], found[UNTRAINED]["speed_up"]
        told = f"{task.name}: {plain[0]:.3f}x untrained, {trained[0]:.3f}x trained"
        claims += [
            Verdict("Without training the head, drafting is slower than ordinary decoding", plain[0] < 1, told),
            Verdict("Training the head makes drafting faster", trained[0] > plain[0], told),
        ]
    return PaperTable(
        "paradecode-3", PAPER, "Table 3: ablation study", ("Consistency Ratio", "Speedup", "quartiles"),
        tuple(Row(label, ours[label], [*published, None]) for label, published in theirs.ABLATION.items()),
        f"{_how(context)} Ours is of {task.name}, theirs of HumanEval. Without verification: the exit's own greedy "
        "text beside the target's, without an engine; no server of ours emits it, so it has no speed-up. With "
        "verification an untrained exit changes no token, only the speed.",
        ("{:.2%}", "{:.3f}x", "{}"), context.settings(*SETTINGS), claims=tuple(claims),
    )  # fmt: skip


def code_task(context: Context) -> Task:
    """The task that stands for HumanEval if one does as a whole, else the first."""
    found = context.counterpart(theirs.TASKS[1])
    return found.task if found is not None and found.whole else context.task


def threshold(context: Context) -> PaperTable:
    task, config = code_task(context), drafting(context)
    calibration = context.calibration(context.heads(KIND)[0])
    exits = predictions(calibration, early_heads(context), context.texts(task), exit_layer(context))
    names = {gamma: f"paradecode, gamma {gamma:g}" for gamma in theirs.GAMMAS if gamma < 1}
    everyone = [Contender(name, {**config, "gamma": gamma}) for gamma, name in names.items()]
    speeds = context.speeds([Contender(BASE), Contender(CONTROL), *everyone], task=task)
    rows = []
    for gamma in theirs.GAMMAS:
        row = speeds.get((names.get(gamma, CONTROL), 1))
        ours = [row["speed_up"][0] if row else None, *exits.rates(gamma), context.quartiles(row)]
        published = theirs.THRESHOLD.get(gamma)
        rows.append(Row(f"gamma = {gamma:g}", ours, published and [*published, None]))
    best = max(
        (row["speed_up"][0], gamma) for gamma, name in names.items() if (row := speeds.get((name, 1))) is not None
    )
    rates = [exits.rates(gamma) for gamma in theirs.GAMMAS]
    early, rejected = [rate for rate, _ in rates], [value for _, value in rates if value is not None]
    claims = (
        Verdict("gamma 0 is the fastest", best[1] == 0, f"{task.name}: {best[0]:.3f}x at gamma {best[1]:g}"),
        Verdict("A higher gamma predicts fewer tokens early", early == sorted(early, reverse=True), task.name),
        Verdict("A higher gamma rejects fewer of them", rejected == sorted(rejected, reverse=True),
                f"{task.name}: {', '.join(f'{value:.1%}' for value in rejected)}"),
        Verdict("Around 30 % are rejected at gamma 0", 0.2 <= rejected[0] <= 0.4, f"{task.name}: {rejected[0]:.1%}"),
    )  # fmt: skip
    columns = ("(a) speedup", "(b) early prediction rate", "(c) verification rejection rate")
    return PaperTable(
        "paradecode-fig-6", PAPER, "Figure 6: varying the early prediction threshold gamma",
        (*columns, "quartiles of (a)"), tuple(rows),
        f"{_how(context)} Ours is of {task.name}. Rates are of every token of its greedy texts, "
        "without an engine: how often the exit "
        "is surer than gamma, and how often it is then wrong. gamma 1 is vLLM alone: no confidence exceeds it. Theirs "
        "is of HumanEval; its curves are drawn without numbers, so only what its text and Table 3 say is here.",
        ("{:.3f}x", "{:.2%}", "{:.2%}", "{}"), context.settings(*SETTINGS), ("gamma", "speedup and rates"),
        tuple(Curve(column, _points(rows, index, "ours"), _points(rows, index, "theirs"))
              for index, column in enumerate(columns)),
        claims,
    )  # fmt: skip


def _points(rows: list[Row], index: int, whose: str) -> list[tuple[float, float]]:
    """What is known of a column over gamma."""
    values = [(getattr(row, whose) or (None,) * 3)[index] for row in rows]
    return [(gamma, value) for gamma, value in zip(theirs.GAMMAS, values, strict=True) if isinstance(value, float)]


def _how(context: Context) -> str:
    return (
        f"Ours: greedy decoding after the prompts of a task, one request at a time, in turns with vLLM alone; "
        f"early head at layer {exit_layer(context)} of {context.num_layers}, gamma 0, {context.options.drafts} drafts."
    )


TABLES: dict[str, Measure] = {
    "paradecode-1": speedups,
    "paradecode-2": consistency,
    "paradecode-3": ablation,
    "paradecode-fig-6": threshold,
}

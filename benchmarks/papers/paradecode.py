# SPDX-License-Identifier: Apache-2.0
"""ParaDecode's tables of speed-ups and consistency (1 and 2), its ablation (3), and Fig. 6 over gamma."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender
from vllm_ppd.benchmarks.harness.results import Row as Summary
from vllm_ppd.benchmarks.papers import Curve, Measure, PaperTable, Row, Value
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.paradecode_texts import predictions, unverified
from vllm_ppd.benchmarks.papers.ppd import early_heads
from vllm_ppd.benchmarks.papers.published import PARADECODE as theirs
from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.io import load_config

KIND = "early"
PAPER = "ParaDecode"
DRAFTER = "SpecDecode, given model w/ given drafter"
OURS = "ParaDecode (Ours), given model"
PARALLEL = "ParaDecode (Ours), given model, layer-parallel schedule"
UNTRAINED = "w/o lightweight LM head training"
SETTINGS = ("rounds", "prompt_tokens", "new_tokens", "engine_dtype", "eager")


def engines(context: Context) -> dict[str, Summary]:
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
        return {name: row for (name, _), row in context.speeds(everyone).items()}

    return context.once("paradecode engines", make)


def drafting(context: Context) -> dict[str, Any]:
    """The paper's setting: every draft is made (gamma 0), always as many."""
    return {
        "method": "paradecode", "model": context.heads(KIND)[0], "exit_layer": exit_layer(context), "adaptive": False,
        "num_speculative_tokens": context.options.drafts,
    }  # fmt: skip


def exit_layer(context: Context) -> int:
    """The exit asked for, or the one nearest to the middle."""
    config = load_config(context.heads(KIND)[0])
    assert isinstance(config, EarlyConfig)
    wanted = context.options.exit_layer or context.num_layers / 2
    return min(config.exit_layers, key=lambda layer: abs(layer - wanted))


def speedups(context: Context) -> PaperTable:
    found, shown = engines(context), (DRAFTER, OURS, PARALLEL)
    return _by_task(
        context, 1, "speed-up over vanilla autoregressive decoding", theirs.SPEEDUPS,
        {name: (found[name]["speed_up"][0], context.quartiles(found[name])) for name in shown if name in found},
        "{:.3f}x",
        f"vLLM alone once more in the same turns: {found[CONTROL]['speed_up'][0]:.3f}x." if CONTROL in found else "",
    )  # fmt: skip


def consistency(context: Context) -> PaperTable:
    found = engines(context)
    ours = {name: (found[name]["consistency"], None) for name in (DRAFTER, OURS, PARALLEL) if name in found}
    control = found.get(CONTROL)
    return _by_task(
        context, 2, "consistency ratio", theirs.CONSISTENCY, ours, "{:.2%}",
        "A token counts if it equals vLLM's own at its place."
        + (f" vLLM against itself: {control['consistency']:.2%}." if control else ""),
    )  # fmt: skip


def _by_task(
    context: Context,
    number: int,
    what: str,
    published: Mapping[str, Sequence[float]],
    ours: Mapping[str, tuple[float, str | None]],  # on the given data, with quartiles of speeds
    form: str,
    further: str,
) -> PaperTable:
    quartiles = any(spread is not None for _, spread in ours.values())
    rows = [Row(label, None, [None, *[None] * quartiles, *values]) for label, values in published.items()]
    rows += [Row(label, [*own[: 1 + quartiles], None, None, None]) for label, own in ours.items()]
    return PaperTable(
        f"paradecode-{number}", PAPER, f"Table {number}: {what}",
        ("given data", *["quartiles"] * quartiles, *theirs.TASKS), tuple(rows),
        f"{_how(context)} Self-SpecDecode is no method of vLLM. {further}", form, context.settings(*SETTINGS),
    )  # fmt: skip


def ablation(context: Context) -> PaperTable:
    found, folder = engines(context), context.heads(KIND)[0]
    calibration = context.calibration(folder)
    alone = unverified(calibration, early_heads(context), calibration.greedy, exit_layer(context))
    ours: dict[str, list[Value]] = {"w/o verification step": [alone, None, None]}
    for label, name in (("ParaDecode", OURS), (UNTRAINED, UNTRAINED)):
        row = found.get(name)
        ours[label] = [None] * 3 if row is None else [row["consistency"], row["speed_up"][0], context.quartiles(row)]
    return PaperTable(
        "paradecode-3", PAPER, "Table 3: ablation study", ("Consistency Ratio", "Speedup", "quartiles"),
        tuple(Row(label, ours[label], [*published, None]) for label, published in theirs.ABLATION.items()),
        f"{_how(context)} Theirs is of HumanEval. Without verification: the exit's own greedy text beside the "
        "target's, without an engine; no server of ours emits it, so it has no speed-up. With "
        "verification an untrained exit changes no token, only the speed.",
        ("{:.2%}", "{:.3f}x", "{}"), context.settings(*SETTINGS),
    )  # fmt: skip


def threshold(context: Context) -> PaperTable:
    folder, config = context.heads(KIND)[0], drafting(context)
    calibration = context.calibration(folder)
    exits = predictions(calibration, early_heads(context), calibration.greedy, exit_layer(context))
    names = {gamma: f"paradecode, gamma {gamma:g}" for gamma in theirs.GAMMAS if gamma < 1}
    everyone = [Contender(name, {**config, "gamma": gamma}) for gamma, name in names.items()]
    speeds = context.speeds([Contender(BASE), Contender(CONTROL), *everyone])
    rows = []
    for gamma in theirs.GAMMAS:
        row = speeds.get((names.get(gamma, CONTROL), 1))
        ours = [row["speed_up"][0] if row else None, *exits.rates(gamma), context.quartiles(row)]
        published = theirs.THRESHOLD.get(gamma)
        rows.append(Row(f"gamma = {gamma:g}", ours, published and [*published, None]))
    columns = ("(a) speedup", "(b) early prediction rate", "(c) verification rejection rate")
    return PaperTable(
        "paradecode-fig-6", PAPER, "Figure 6: varying the early prediction threshold gamma",
        (*columns, "quartiles of (a)"), tuple(rows),
        f"{_how(context)} Rates are of every token of the target's greedy texts, without an engine: how often the exit "
        "is surer than gamma, and how often it is then wrong. gamma 1 is vLLM alone: no confidence exceeds it. Theirs "
        "is of HumanEval; its curves are drawn without numbers, so only what its text and Table 3 say is here.",
        ("{:.3f}x", "{:.2%}", "{:.2%}", "{}"), context.settings(*SETTINGS), ("gamma", "speedup and rates"),
        tuple(Curve(column, _points(rows, index, "ours"), _points(rows, index, "theirs"))
              for index, column in enumerate(columns)),
    )  # fmt: skip


def _points(rows: list[Row], index: int, whose: str) -> list[tuple[float, float]]:
    """What is known of a column over gamma."""
    values = [(getattr(row, whose) or (None,) * 3)[index] for row in rows]
    return [(gamma, value) for gamma, value in zip(theirs.GAMMAS, values, strict=True) if isinstance(value, float)]


def _how(context: Context) -> str:
    return (
        f"Ours: greedy decoding after prompts of the given data, one request at a time, in turns with vLLM alone; "
        f"early head at layer {exit_layer(context)} of {context.num_layers}, gamma 0, {context.options.drafts} drafts."
    )


TABLES: dict[str, Measure] = {
    "paradecode-1": speedups,
    "paradecode-2": consistency,
    "paradecode-3": ablation,
    "paradecode-fig-6": threshold,
}

# SPDX-License-Identifier: Apache-2.0
"""DynaMo's table of perplexities (2), and its comparison of speed-ups (4)."""

from __future__ import annotations

from pathlib import Path

from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender
from vllm_ppd.benchmarks.papers.context import Context, once, timed
from vllm_ppd.benchmarks.papers.table import PaperTable, Row, Verdict, paper_table, published
from vllm_ppd.heads.dynamo import calibration as dynamo_calibration
from vllm_ppd.heads.dynamo.config import DynaMoConfig
from vllm_ppd.heads.dynamo.measures import DynaMoMeasures

KIND = "dynamo"
theirs = published(KIND)
TEMPERATURE = 0.7  # appendix A.1
EPS_B = (0.0, 0.3, 0.5, 0.7)  # of unverified engines


def config_of(context: Context, folder: str) -> DynaMoConfig:
    """The configuration of DynaMo heads."""
    config = context.calibration(folder).config
    assert isinstance(config, DynaMoConfig)
    return config


def name(context: Context, folder: str) -> str:
    """Heads as the paper names its models, by their number of tokens."""
    return f"DynaMo-T{config_of(context, folder).tokens}, {Path(folder).name}"


@once
def measures_of(context: Context, folder: str) -> DynaMoMeasures:
    """Target and heads of a folder, as `ppd calibrate` measures them."""
    return dynamo_calibration.measures_of(context.calibration(folder))


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


def baselines(context: Context) -> PaperTable:
    """Table 4: verified n-grams keep the base's distribution, so their speed-up is that at the same quality."""
    drafting: dict[str, Contender] = {}  # by the label of its row
    for folder in context.heads(KIND):
        drafts = config_of(context, folder).tokens - 1
        config = {"method": "dynamo", "model": folder, "num_speculative_tokens": drafts, "adaptive": False}
        label = name(context, folder)
        drafting[f"{label}, verified: same quality"] = Contender(f"{label}, verified", config)
        for eps in EPS_B:
            unverified = f"{label}, unverified, eps_b = {eps:g}"
            drafting[unverified] = Contender(unverified, {**config, "verify": False, "eps_b": eps})
    summaries = context.speeds([Contender(BASE), Contender(CONTROL), *drafting.values()], temperature=TEMPERATURE)
    rows, claims = [Row("vLLM, again", timed(summaries.get(CONTROL)))], []
    for label, contender in drafting.items():
        if (row := summaries.get(contender.name)) is None:
            continue
        rows.append(Row(label, [*timed(row), row["length"], row["repeated_4_grams"]]))
        if contender.name.endswith(", verified"):
            median, low, high = row["speed_up"]
            faster = True if low > 1 else False if high < 1 else None
            evidence = f"{label}: {median:.3f}x, quartiles {low:.2f} to {high:.2f}"
            claims.append(Verdict("Multi-token drafts are faster at the same quality", faster, evidence))
    for label, (_, _, speed_up) in theirs.BASELINES.items():
        rows.append(Row(label, None, [speed_up]))
    settings = context.settings("rounds", "new_tokens", "engine_dtype", "eager") | {"task": context.task.name}
    return paper_table("dynamo-4", rows, settings=settings, claims=claims, temperature=TEMPERATURE)


TABLES = {"dynamo-2": suite, "dynamo-4": baselines}

# SPDX-License-Identifier: Apache-2.0
"""DynaMo's table of perplexities (2) and its comparison of speed-ups (4), texts judged by the base's likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender
from vllm_ppd.benchmarks.harness.results import Row as Summary
from vllm_ppd.benchmarks.papers.context import Context, once, timed
from vllm_ppd.benchmarks.papers.ngrams import Emitted, emit
from vllm_ppd.benchmarks.papers.table import PaperTable, Row, Verdict, paper_table, published
from vllm_ppd.heads.calibration.session import Calibration
from vllm_ppd.heads.calibration.text import Texts, log_prob_of
from vllm_ppd.heads.dynamo import calibration as dynamo_calibration
from vllm_ppd.heads.dynamo.config import DynaMoConfig, JointSettings
from vllm_ppd.heads.dynamo.measures import DynaMoMeasures

KIND = "dynamo"
theirs = published(KIND)
TEMPERATURE, PENALTY = 0.7, 1.1  # appendix A.1
BASES = 8  # texts of the base a prompt
SPARSE = 4  # texts are written after each fourth prompt: a joint of three heads has 125,000 entries a token
EPS_B = (0.0, 0.3, 0.5, 0.7)
SERVED_EPS_B = (0.0, 0.5)  # of the unverified engines of Table 4


def name(context: Context, folder: str) -> str:
    """Heads as the paper names its models, by their number of tokens."""
    return f"DynaMo-T{config_of(context, folder).tokens}, {Path(folder).name}"


def config_of(context: Context, folder: str) -> DynaMoConfig:
    """The configuration of DynaMo heads."""
    config = context.calibration(folder).config
    assert isinstance(config, DynaMoConfig)
    return config


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


@once
def engines(context: Context) -> dict[str, Summary]:
    """Everyone of Table 4, sampling, one request at a time; who failed to start is missing."""
    contenders = [Contender(BASE), Contender(CONTROL)]
    for folder in context.heads(KIND):
        drafts = config_of(context, folder).tokens - 1
        config = {"method": "dynamo", "model": folder, "num_speculative_tokens": drafts, "adaptive": False}
        label = name(context, folder)
        contenders.append(Contender(f"{label}, verified", config))
        for eps in SERVED_EPS_B:
            contenders.append(Contender(_unverified(label, eps), {**config, "verify": False, "eps_b": eps}))
    return context.speeds(contenders, temperature=TEMPERATURE)


def _unverified(label: str, eps_b: float) -> str:
    return f"{label}, unverified, eps_b = {eps_b:g}"


def baselines(context: Context) -> PaperTable:
    """Table 4."""
    summaries = engines(context)
    rows = [Row("vLLM, again", [None, None, None, *timed(summaries.get(CONTROL))])]
    for folder in context.heads(KIND):
        label, points = name(context, folder), sweep(context, folder)
        rates = [(point.speed_up, point.win_rate) for point in points if point.win_rate is not None]
        same = same_quality([(1.0, 1.0), *rates], config_of(context, folder).tokens)
        best = "none" if same is None else f"{same.speed_up:.2f}x" + "*" * same.extrapolated
        rows.append(Row(f"{label}, same quality", [best]))
        for point in points:
            served = _unverified(label, point.eps_b)
            measured = [f"{point.speed_up:.2f}x", point.win_rate, point.repeated]
            rows.append(Row(served, [*measured, *timed(summaries.get(served))]))
        rows.append(Row(f"{label}, verified", [None, None, None, *timed(summaries.get(f"{label}, verified"))]))
    for label, (_, _, speed_up) in theirs.BASELINES.items():
        rows.append(Row(label, None, [speed_up if isinstance(speed_up, str) else f"{speed_up:.2f}x"]))
    prompts, tokens = len(_prompts(context)[0]), context.options.new_tokens // 2
    return paper_table(
        "dynamo-4", rows, bases=BASES, temperature=TEMPERATURE, penalty=PENALTY,
        settings={"task": context.task.name, "prompts": prompts, "new_tokens": tokens}
        | context.settings("rounds", "engine_dtype", "eager"),
    )  # fmt: skip


class Point(NamedTuple):
    """Texts written at a threshold."""

    eps_b: float
    speed_up: float  # tokens a pass
    win_rate: float | None  # None: no losses
    repeated: float  # share of 4-grams that occurred before in their text


@once
def sweep(context: Context, folder: str) -> list[Point]:
    """Unverified texts of heads, and what they are worth, at each of EPS_B."""
    count = len(_prompts(context)[0])
    base = _emit(context, folder, torch.ones(BASES * count), seed=1).texts
    base_log_probs = mean_log_prob(context.calibration(folder), base).view(BASES, -1)
    emitted = _emit(context, folder, torch.tensor(EPS_B).repeat_interleave(count))
    points = []
    for i, eps in enumerate(EPS_B):
        written = emitted.rows(slice(i * count, (i + 1) * count))
        win = win_rate(mean_log_prob(context.calibration(folder), written.texts), base_log_probs)
        points.append(Point(eps, written.tokens_a_pass(), win, written.texts.repeated_4_grams()))
    return points


def _emit(context: Context, folder: str, eps_b: torch.Tensor, seed: int = 0) -> Emitted:
    """Texts after the prompts, over and over, one for each threshold."""
    prompts, starts = _prompts(context)
    times = len(eps_b) // len(prompts)
    sampling = {"k": config_of(context, folder).sampling.k, "repetition_penalty": PENALTY}
    generator = torch.Generator(prompts.device).manual_seed(context.options.seed + seed)
    return emit(
        measures_of(context, folder), prompts.repeat(times, 1), context.options.new_tokens // 2,
        JointSettings.model_validate(sampling), eps_b.to(prompts.device), TEMPERATURE, generator, starts.repeat(times),
    )  # fmt: skip


def _prompts(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Some of the first task's, and where they begin."""
    prompts, starts = context.task.padded(context.target.device)
    assert starts is not None
    first = starts[::SPARSE].min()
    return prompts[::SPARSE, int(first) :], starts[::SPARSE] - first


@torch.no_grad()
def mean_log_prob(calibration: Calibration, texts: Texts) -> torch.Tensor:
    """Mean log-probability a generated token by the target at temperature 1 given all before it, in nats: [texts]."""
    target, means = calibration.target, []
    for rows, windows in texts.batches(calibration.options.batch):
        with calibration.autocast():
            final = target.run(windows).final
        generated, valid = texts.generated[rows], texts.valid()[rows]
        log_p = log_prob_of(target, texts.reading(final, windows), generated.flatten(), 0.0).view_as(generated)
        means.append((log_p * valid).sum(1) / valid.sum(1).clamp(min=1))
    return torch.cat(means)


def win_rate(
    ours: torch.Tensor,  # [prompts]
    base: torch.Tensor,  # [texts of the base, prompts]
) -> float | None:
    """Wins over losses of texts against the base's of the same prompt, the likelier one winning; None: no losses."""
    losses = int((ours < base).sum())
    return int((ours > base).sum()) / losses if losses else None


class SameQuality(NamedTuple):
    """Where the regression of win rates over speed-ups is 1 (DynaMo, section 4.3)."""

    speed_up: float  # within 1 and the most tokens a pass
    extrapolated: bool  # beyond what was measured: "theoretical", marked * in the paper


def same_quality(points: Sequence[tuple[float, float]], most: float) -> SameQuality | None:
    """From (speed-up, win rate); None if the texts are worse at every speed-up, or there are too few points."""
    if len({x for x, _ in points}) < 2:
        return None
    speed_ups, rates = np.array(points).T
    slope, start = np.polyfit(speed_ups, rates, 1)
    if slope >= 0:
        return SameQuality(most, True) if rates.min() >= 1 else None
    crossing = (1 - start) / slope
    if crossing < 1:
        return None
    return SameQuality(float(min(crossing, most)), bool(crossing > speed_ups.max()))


TABLES = {"dynamo-2": suite, "dynamo-4": baselines}

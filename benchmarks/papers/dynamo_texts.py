# SPDX-License-Identifier: Apache-2.0
"""DynaMo's ablation of generated text (Fig. 12), judged by the base's likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_ppd.benchmarks.papers.context import Context, once
from vllm_ppd.benchmarks.papers.ngrams import Emitted, emit
from vllm_ppd.benchmarks.papers.published import DYNAMO as theirs
from vllm_ppd.benchmarks.papers.table import PaperTable, Row, Verdict, paper_table
from vllm_ppd.heads.calibration.session import Calibration
from vllm_ppd.heads.calibration.text import Texts, log_prob_of
from vllm_ppd.heads.dynamo import calibration as dynamo_calibration
from vllm_ppd.heads.dynamo.config import DynaMoConfig, JointSettings
from vllm_ppd.heads.dynamo.measures import DynaMoMeasures

TEMPERATURE, PENALTY = 0.7, 1.1  # appendix A.1
BASES = 8  # texts of the base a prompt
SPARSE = 4  # texts are written after each fourth prompt: a joint of three heads has 125,000 entries a token
EPS_B = (0.0, 0.3, 0.5, 0.7)
# Appendix C.1: co-occurrence masking with its power, adaptive thresholding, Gaussian blur of that kernel.
SCHEMES: dict[str, dict[str, float]] = {
    "CO + AT + G-3": {},
    "CO + AT": {"blur": 1},
    "CO": {"adaptive": False},
    "CO-0.5 + AT + G-3": {"alpha_c": 0.5},
    "AT + G-3": {"alpha_c": 0.0},
    "vanilla": {"alpha_c": 0.0, "adaptive": False},
}
DEFAULT = next(iter(SCHEMES))


class Point(NamedTuple):
    """Texts of one scheme at one threshold."""

    eps_b: float
    speed_up: float  # tokens a pass
    win_rate: float | None  # None: no losses
    log_prob: float  # mean a text, in nats a token, by the base
    repeated: float  # share of 4-grams that occurred before in their text


def config_of(context: Context, folder: str) -> DynaMoConfig:
    """The configuration of DynaMo heads."""
    config = context.calibration(folder).config
    assert isinstance(config, DynaMoConfig)
    return config


@once
def measures_of(context: Context, folder: str) -> DynaMoMeasures:
    """Target and heads of a folder, as `ppd calibrate` measures them."""
    return dynamo_calibration.measures_of(context.calibration(folder))


@once
def sweep(context: Context, folder: str, scheme: str) -> list[Point]:
    """A scheme at each of EPS_B."""
    count, base = len(_prompts(context)[0]), _base_log_probs(context, folder)
    emitted = _emit(context, folder, scheme, torch.tensor(EPS_B).repeat_interleave(count))
    points = []
    for i, eps in enumerate(EPS_B):
        texts = emitted.rows(slice(i * count, (i + 1) * count))
        ours = mean_log_prob(context.calibration(folder), texts.texts)
        repeated = texts.texts.repeated_4_grams()
        points.append(Point(eps, texts.tokens_a_pass(), win_rate(ours, base), float(ours.mean()), repeated))
    return points


@once
def _base_log_probs(context: Context, folder: str) -> torch.Tensor:
    """Log-probabilities of the base's own texts: [BASES, prompts]."""
    ones = torch.ones(BASES * len(_prompts(context)[0]))
    texts = _emit(context, folder, DEFAULT, ones, seed=1).texts
    return mean_log_prob(context.calibration(folder), texts).view(BASES, -1)


def _emit(context: Context, folder: str, scheme: str, eps_b: torch.Tensor, seed: int = 0) -> Emitted:
    """Texts after the prompts, over and over, one for each threshold."""
    prompts, starts = _prompts(context)
    times = len(eps_b) // len(prompts)
    sampling = {"k": config_of(context, folder).sampling.k, "repetition_penalty": PENALTY, **SCHEMES[scheme]}
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


def text_settings(context: Context) -> dict[str, Any]:
    """What the texts are of, for a table to name."""
    return {
        "task": context.task.name, "prompts": len(_prompts(context)[0]), "new_tokens": context.options.new_tokens // 2,
    }  # fmt: skip


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


def quality(context: Context, folder: str, scheme: str) -> SameQuality | None:
    """The same-quality speed-up of a scheme, from its points and the base itself."""
    points = sweep(context, folder, scheme)
    rates = [(point.speed_up, point.win_rate) for point in points if point.win_rate is not None]
    return same_quality([(1.0, 1.0), *rates], measures_of(context, folder).heads.tokens)


def best_cell(same: SameQuality | None) -> str:
    """A same-quality speed-up as a table shows it."""
    return "none" if same is None else f"{same.speed_up:.2f}x" + "*" * same.extrapolated


def ablation(context: Context) -> PaperTable:
    """Fig. 12."""
    folder = context.heads("dynamo")[0]
    rows: list[Row] = []
    speeds: dict[str, SameQuality | None] = {}
    for scheme in SCHEMES:
        published = theirs.ABLATION.get(scheme)
        if "CO" in scheme and measures_of(context, folder).counts is None:
            rows.append(Row(f"{scheme}, eps_b = {theirs.ABLATION_EPS_B:g}", None, published))
            continue
        for point in sweep(context, folder, scheme):
            ours = [point.speed_up, point.win_rate, -point.log_prob, point.repeated]
            beside = published if point.eps_b == theirs.ABLATION_EPS_B else None
            rows.append(Row(f"{scheme}, eps_b = {point.eps_b:g}", ours, beside))
        speeds[scheme] = same = quality(context, folder, scheme)
        rows.append(Row(f"{scheme}, same-quality speed-up", [best_cell(same), None if same is None else 1.0]))
    reached = {scheme: same.speed_up for scheme, same in speeds.items() if same is not None}
    evidence = ", ".join(f"{scheme} {best_cell(same).rstrip('*')}" for scheme, same in speeds.items())
    highest = DEFAULT in reached and reached[DEFAULT] == max(reached.values())
    return paper_table(
        "dynamo-fig-12", rows, settings=text_settings(context),
        claims=[Verdict(f"{DEFAULT} has the highest same-quality speed-up", highest, evidence)],
        temperature=TEMPERATURE, penalty=PENALTY, bases=BASES,
    )  # fmt: skip

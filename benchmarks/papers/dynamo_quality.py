# SPDX-License-Identifier: Apache-2.0
"""DynaMo's figures of generated text: n-grams by eps_b (5), the ablation (12); texts are made once for both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_ppd.benchmarks.papers import Curve, PaperTable, Row, Value, Verdict
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.likelihood import SameQuality, mean_log_prob, same_quality, win_rate
from vllm_ppd.benchmarks.papers.ngrams import Emitted, emit
from vllm_ppd.benchmarks.papers.published import DYNAMO as theirs
from vllm_ppd.heads.dynamo import calibration as dynamo_calibration
from vllm_ppd.heads.dynamo.config import DynaMoConfig
from vllm_ppd.heads.dynamo.joint_settings import JointSettings
from vllm_ppd.heads.dynamo.measures import DynaMoMeasures

PAPER = "DynaMo"
TEMPERATURE, PENALTY = 0.7, 1.1  # appendix A.1
BASES = 8  # texts of the base a prompt
SPARSE = 4  # one prompt of so many is written after
EPS_B = tuple(i / 10 for i in range(11))
ABLATED_EPS_B = (0.0, 0.3, 0.5, 0.7)
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
JUDGE = (
    "No judge: text quality is the base model's own likelihood of the generated text. A text wins over a text of the "
    f"base for the same prompt if its mean log-probability a token is higher; {BASES} texts of the base a prompt, "
    "drawn from its top-k; win rate is wins / losses."
)
HOW = (
    f"Ours: texts written by Algorithm 1 after prompts of the first task, unverified, temperature {TEMPERATURE}, "
    f"repetition penalty {PENALTY}, top-k as the heads have it; speed-up is tokens a pass."
)
NAMES = ("unigrams", "bigrams", "trigrams")


@dataclass
class Point:
    """Texts of one scheme at one threshold."""

    eps_b: float
    speed_up: float  # tokens a pass
    shares: list[float]  # of passes that emitted 1, 2, ... n tokens
    win_rate: float | None  # None: no losses
    log_prob: float  # mean a text, in nats a token, by the base
    repeated: float  # share of 4-grams that occurred before in their text


def measures_of(context: Context, folder: str) -> DynaMoMeasures:
    return context.once(("dynamo", folder), lambda: dynamo_calibration.measures_of(context.calibration(folder)))


def sweep(context: Context, folder: str, scheme: str, eps_b: tuple[float, ...]) -> list[Point]:
    """A scheme at some thresholds, each measured once."""
    wanted = [eps for eps in eps_b if (folder, scheme, eps) not in _points(context)]
    if wanted:
        found = _measure(context, folder, scheme, wanted)
        _points(context).update({(folder, scheme, point.eps_b): point for point in found})
    return [_points(context)[folder, scheme, eps] for eps in eps_b]


def _points(context: Context) -> dict[tuple[str, str, float], Point]:
    return context.once("dynamo points", dict)


def _measure(context: Context, folder: str, scheme: str, eps_b: list[float]) -> list[Point]:
    measures, base = measures_of(context, folder), _base(context, folder)
    count = len(_prompts(context)[0])
    settings = _settings(context, folder, scheme)
    each = torch.tensor(eps_b).repeat_interleave(count)
    emitted = _emit(context, measures, len(eps_b), settings, each, seed=context.options.seed)
    rows = [slice(start, start + count) for start in range(0, len(each), count)]
    return [_point(context, folder, eps, emitted.part(part), base) for eps, part in zip(eps_b, rows, strict=True)]


def _point(context: Context, folder: str, eps_b: float, emitted: Emitted, base: torch.Tensor) -> Point:
    ours = _log_prob(context, folder, emitted)
    return Point(
        eps_b, emitted.tokens_a_pass(), emitted.shares(), win_rate(ours, base), float(ours.mean()),
        emitted.texts.repeated_4_grams(),
    )  # fmt: skip


def _base(context: Context, folder: str) -> torch.Tensor:
    """Log-probabilities of the base's own texts: [BASES, prompts]."""

    def make() -> torch.Tensor:
        settings, ones = _settings(context, folder, DEFAULT), torch.ones(BASES * len(_prompts(context)[0]))
        emitted = _emit(context, measures_of(context, folder), BASES, settings, ones, seed=context.options.seed + 1)
        return _log_prob(context, folder, emitted).view(BASES, -1)

    return context.once(("dynamo base", folder), make)


def _emit(
    context: Context, measures: DynaMoMeasures, times: int, settings: JointSettings, eps_b: torch.Tensor, seed: int
) -> Emitted:
    """So many texts after each prompt."""
    prompts, starts = _prompts(context)
    generator = torch.Generator(prompts.device).manual_seed(seed)
    tokens = context.options.new_tokens // 2
    return emit(
        measures, prompts.repeat(times, 1), tokens, settings, eps_b.to(prompts.device), TEMPERATURE, generator,
        starts.repeat(times),
    )  # fmt: skip


def _log_prob(context: Context, folder: str, emitted: Emitted) -> torch.Tensor:
    calibration = context.calibration(folder)
    return mean_log_prob(calibration.target, emitted.texts, context.options.batch, calibration.autocast)


def _prompts(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Some of the first task's, and where they begin, as a joint of three heads has 125,000 entries a token."""
    prompts, starts = context.task.padded(context.target.device)
    chosen = starts[::SPARSE]
    return prompts[::SPARSE, int(chosen.min()) :], chosen - chosen.min()


def _settings(context: Context, folder: str, scheme: str) -> JointSettings:
    config = context.calibration(folder).config
    assert isinstance(config, DynaMoConfig)
    return JointSettings.model_validate({"k": config.sampling.k, "repetition_penalty": PENALTY, **SCHEMES[scheme]})


def quality(context: Context, folder: str, scheme: str, eps_b: tuple[float, ...]) -> SameQuality | None:
    """The same-quality speed-up of a scheme, from its points and the base itself."""
    points = sweep(context, folder, scheme, eps_b)
    pairs = [(point.speed_up, point.win_rate) for point in points if point.win_rate is not None]
    return same_quality([(1.0, 1.0), *pairs], measures_of(context, folder).heads.tokens)


def shares(context: Context) -> PaperTable:
    folder = context.heads("dynamo")[0]
    found = sweep(context, folder, DEFAULT, EPS_B)
    n = len(found[0].shares)
    names = (*NAMES, *(f"{size}-grams" for size in range(4, n + 1)))
    rows = []
    for point in found:
        published = theirs.SHARES.get(point.eps_b)
        ours: list[Value] = [*point.shares, *[None] * (len(names) - n)]
        rows.append(Row(f"eps_b = {point.eps_b:g}", ours, published and [*published, *[None] * (len(names) - 3)]))
    between = [point for point in found if 0 < point.eps_b < 1 and point.shares[-1] < 1]
    told = ", ".join(f"{p.shares[1]:.0%} and {p.shares[-1]:.0%} at {p.eps_b:g}" for p in between[::3])
    claim = "Generations of two tokens are fewer than those of three"
    claims = (Verdict(claim, all(p.shares[1] < p.shares[-1] for p in between), told),) if n == 3 else ()
    curves = [
        Curve(name, [(p.eps_b, p.shares[i]) for p in found] if i < n else None,
              [(eps, values[i]) for eps, values in theirs.SHARES.items()] if i < 3 else None)
        for i, name in enumerate(names)
    ]  # fmt: skip
    return PaperTable(
        "dynamo-fig-5", PAPER, "Figure 5: percentage of unigram, bigram and trigram generations vs. eps_b", names,
        tuple(rows), f"{HOW} Theirs: DynaMo-70M-T3; the figure is drawn without numbers, its text names both ends.",
        "{:.2%}", text_settings(context), ("eps_b", "share of generations"), tuple(curves), claims,
    )  # fmt: skip


def ablation(context: Context) -> PaperTable:
    folder = context.heads("dynamo")[0]
    rows, curves, speeds = [], [], {}
    for scheme in SCHEMES:
        masked = "CO" in scheme
        if masked and measures_of(context, folder).counts is None:
            rows.append(Row(f"{scheme}, eps_b = {theirs.ABLATION_EPS_B:g}", None, _published(scheme)))
            continue
        found = sweep(context, folder, scheme, ABLATED_EPS_B)
        for point in found:
            published = _published(scheme) if point.eps_b == theirs.ABLATION_EPS_B else None
            ours = [point.speed_up, point.win_rate, -point.log_prob, point.repeated]
            rows.append(Row(f"{scheme}, eps_b = {point.eps_b:g}", ours, published))
        same = quality(context, folder, scheme, ABLATED_EPS_B)
        speeds[scheme] = 0.0 if same is None else same.speed_up
        best: list[Value] = ["none", None] if same is None else [f"{same.speed_up:.2f}x" + "*" * same.extrapolated, 1.0]
        rows.append(Row(f"{scheme}, same-quality speed-up", [*best, None, None]))
        curves.append(Curve(scheme, [(p.speed_up, p.win_rate) for p in found if p.win_rate is not None]))
    told = ", ".join(f"{scheme} {speed:.2f}x" if speed else f"{scheme} none" for scheme, speed in speeds.items())
    highest = DEFAULT in speeds and 0 < speeds[DEFAULT] == max(speeds.values())
    claims = (Verdict(f"{DEFAULT} has the highest same-quality speed-up", highest, told),)
    return PaperTable(
        "dynamo-fig-12", PAPER, "Figure 12: ablation of adaptive thresholding (with and without Gaussian blur) and "
        "co-occurrence masking",
        ("speed-up", "win rate", "nats a token by the base", "repeated 4-grams"), tuple(rows),
        f"{HOW} {JUDGE} Loops are likely, so texts that repeat themselves win: see repeated 4-grams. Same-quality "
        "speed-up: where the regression of win rates over speed-ups, the base itself (1, 1) included, is 1 (none: "
        "worse at every speed-up; *: beyond what was measured). Theirs: the figure is drawn without numbers; beside "
        "eps_b = 0.5 stands Table 9, of DynaMo-7.3B-T3 on the Vicuna benchmark with GPT-4 as judge. vanilla is neither "
        "masked nor adaptive (Fig. 11).",
        ("{:.2f}x", "{:.2f}", "{:.3f}", "{:.2%}"), text_settings(context), ("speed-up", "win rate"), tuple(curves),
        claims,
    )  # fmt: skip


def _published(scheme: str) -> tuple[Value, ...] | None:
    values = theirs.ABLATION.get(scheme)
    return None if values is None else (*values, None, None)


def text_settings(context: Context) -> dict[str, Any]:
    return {
        "task": context.task.name, "prompts": len(_prompts(context)[0]), "new_tokens": context.options.new_tokens // 2,
    }  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""DynaMo heads measured: perplexities (eq. 4), PPL_d against eps_b with the share of n-grams, expected acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_ppd.heads.calibration.parts import counts as counts_of
from vllm_ppd.heads.calibration.parts import timing, vocabularies, vocabulary_tables
from vllm_ppd.heads.calibration.replay import Drafted
from vllm_ppd.heads.calibration.run import Calibration, Part
from vllm_ppd.heads.calibration.tables import percent, table
from vllm_ppd.heads.dynamo.config import DynaMoConfig
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.joint_settings import JointSettings
from vllm_ppd.heads.dynamo.measures import DynaMoMeasures
from vllm_ppd.heads.dynamo.module import DynaMoHeads
from vllm_ppd.heads.dynamo.recipe import new_layers
from vllm_ppd.heads.training.tokens import Batch

DYNAMIC_TOKENS = 1024  # a joint of three heads has 125,000 entries a token


def likelihood(calibration: Calibration) -> dict[str, Any]:
    """PPL_n and PPL_1:n on the data itself (DynaMo, Table 2)."""
    return measures_of(calibration).perplexities(calibration.windows)


def dynamic(calibration: Calibration) -> dict[str, Any]:
    """PPL_d and the share of n-grams against eps_b (DynaMo, Figs. 5 and 15), on at most DYNAMIC_TOKENS of the data."""
    measures, settings = measures_of(calibration), _joint_settings(calibration)
    windows = calibration.windows[0]
    few = max(1, DYNAMIC_TOKENS // windows.input_ids.shape[1])
    batch = Batch(windows.input_ids[:few], windows.position_ids[:few])
    return {"by_eps_b": measures.dynamic_perplexity([batch], settings, calibration.options.eps)}


def acceptance(calibration: Calibration) -> dict[str, Any]:
    """Expected acceptance in verified mode, by back-off threshold and drafts."""
    options, measures, settings = calibration.options, measures_of(calibration), _joint_settings(calibration)
    found: dict[str, Any] = {}
    for name, texts in (("greedy", calibration.greedy), (f"T {options.temperature:g}", calibration.sampled)):
        rows = _by_threshold(measures.drafted(texts, settings, options.batch, options.eps), settings)
        found[name] = {"rows": rows, "repeated_4_grams": round(texts.repeated_4_grams(), 4)}
    return found


def vocabulary(calibration: Calibration) -> dict[str, Any]:
    """Expected acceptance in verified mode on sampled texts with shorter draft vocabularies."""
    options, measures, settings = calibration.options, measures_of(calibration), _joint_settings(calibration)
    return {
        str(len(ids)): {
            "covers": share,
            "rows": _by_threshold(
                measures.drafted(calibration.sampled, settings, options.batch, options.eps, ids), settings
            ),
        }
        for ids, share in vocabularies(calibration)
    }


def mask(calibration: Calibration) -> dict[str, Any]:
    """Expected acceptance in verified mode on sampled texts with other powers of the co-occurrence mask (eq. 6)."""
    options, measures, settings = calibration.options, measures_of(calibration), _joint_settings(calibration)
    found: dict[str, Any] = {}
    for alpha in options.alphas if measures.counts is not None else ():
        if alpha != settings.alpha_c:
            other = settings.model_copy(update={"alpha_c": alpha})
            counts = measures.drafted(calibration.sampled, other, options.batch, options.eps)
            found[f"{alpha:g}"] = {"rows": _by_threshold(counts, other)}
    return found


def _by_threshold(counts: dict[tuple[float, int], Drafted], settings: JointSettings) -> list[dict[str, Any]]:
    return [
        {"eps_b": eps, "alpha_c": settings.alpha_c, "drafts_allowed": drafts, **counts_of(c)}
        for (eps, drafts), c in counts.items()
    ]


def measures_of(calibration: Calibration) -> DynaMoMeasures:
    config, target = calibration.config, calibration.target
    assert isinstance(config, DynaMoConfig)
    heads = DynaMoHeads(new_layers(target, config.tokens))
    heads.load(calibration.tensors)
    heads.to(target.device, target.dtype).eval()
    counts = CoOccurrence.from_tensors(calibration.tensors)
    return DynaMoMeasures(target, heads, counts and counts.to(target.device), calibration.autocast)


def _joint_settings(calibration: Calibration) -> JointSettings:
    config = calibration.config
    assert isinstance(config, DynaMoConfig)
    return config.sampling


PARTS: dict[str, Part] = {
    "timing": timing,
    "likelihood": likelihood,
    "dynamic": dynamic,
    "acceptance": acceptance,
    "vocabulary": vocabulary,
    "mask": mask,
}


def tables(parts: dict[str, Any], _: dict[str, Any]) -> Iterator[str]:
    found = parts["likelihood"]
    n = len(found["ppl_n"])
    yield "Perplexities on the data (DynaMo, Table 2)"
    names = [*(f"PPL_{i}" for i in range(1, n + 1)), *(f"PPL_1:{i}" for i in range(2, n + 1))]
    yield table(names, [[*found["ppl_n"], *found["ppl_1:n"][1:]]])
    yield "Dynamic perplexity and share of n-grams against eps_b (DynaMo, Figs. 5 and 15)"
    grams = ["unigrams", "bigrams", "trigrams", "4-grams"][:n]
    rows = [
        [by["eps_b"], by["ppl_d"], f"{by['tokens_a_pass']:.3f}", *map(percent, by["share"])]
        for by in parts["dynamic"]["by_eps_b"]
    ]
    yield table(["eps_b", "PPL_d", "tokens a pass", *grams], rows)
    yield "Verified mode: drafts accepted a step (accepted / steps; rate = accepted / drafted)"
    rows = [
        [name, row["eps_b"], row["drafts_allowed"], percent(row["rate"]), f"{row['drafted'] / row['cycles']:.3f}",
         f"{row['accepted'] / row['cycles']:.3f}", by["repeated_4_grams"]]
        for name, by in parts["acceptance"].items() for row in by["rows"]
    ]  # fmt: skip
    yield table(["texts", "eps_b", "most drafts", "rate", "drafted", "accepted", "repeated 4-grams"], rows)
    yield from vocabulary_tables(parts["vocabulary"])
    if parts.get("mask"):
        yield "Sampled texts, other powers alpha_c of the co-occurrence mask (DynaMo, eq. 6)"
        rows = [
            [alpha, row["eps_b"], row["drafts_allowed"], percent(row["rate"]),
             f"{row['drafted'] / row['cycles']:.3f}", f"{row['accepted'] / row['cycles']:.3f}"]
            for alpha, by in parts["mask"].items() for row in by["rows"]
        ]  # fmt: skip
        yield table(["alpha_c", "eps_b", "most drafts", "rate", "drafted", "accepted"], rows)

# SPDX-License-Identifier: Apache-2.0
"""DynaMo heads measured: perplexities (eq. 4), PPL_d against eps_b with the share of n-grams, expected acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vllm_ppd.heads.calibration.session import Calibration
from vllm_ppd.heads.calibration.text import Texts
from vllm_ppd.heads.dynamo.config import DynaMoConfig, DynaMoParts, JointSettings, Row, Rows
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.measures import DynaMoMeasures
from vllm_ppd.heads.dynamo.module import DynaMoHeads
from vllm_ppd.heads.dynamo.recipe import new_layers
from vllm_ppd.heads.in_words import percent, table, vocabulary_table
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


def acceptance(calibration: Calibration) -> dict[str, Rows]:
    """Expected acceptance in verified mode, by back-off threshold and drafts."""
    measures, settings = measures_of(calibration), _joint_settings(calibration)
    return {
        name: Rows(rows=_rows(calibration, measures, texts, settings), repeated_4_grams=texts.repeated_4_grams())
        for name, texts in calibration.texts()
    }


def vocabulary(calibration: Calibration) -> dict[int, Rows]:
    """Expected acceptance in verified mode on sampled texts with shorter draft vocabularies."""
    measures, settings = measures_of(calibration), _joint_settings(calibration)
    return {
        len(ids): Rows(rows=_rows(calibration, measures, calibration.sampled, settings, ids), covers=share)
        for ids, share in calibration.vocabularies()
    }


def mask(calibration: Calibration) -> dict[str, Rows]:
    """Expected acceptance in verified mode on sampled texts with other powers of the co-occurrence mask (eq. 6)."""
    measures, settings = measures_of(calibration), _joint_settings(calibration)
    powers = [] if measures.counts is None else calibration.options.alphas
    return {
        f"{alpha:g}": Rows(
            rows=_rows(calibration, measures, calibration.sampled, settings.model_copy(update={"alpha_c": alpha}))
        )
        for alpha in powers if alpha != settings.alpha_c
    }  # fmt: skip


def _rows(
    calibration: Calibration, measures: DynaMoMeasures, texts: Texts, settings: JointSettings,
    token_ids: torch.Tensor | None = None,
) -> list[Row]:  # fmt: skip
    options = calibration.options
    counts = measures.drafted(texts, settings, options.batch, options.eps, token_ids)
    return [
        Row(eps_b=eps, alpha_c=settings.alpha_c, drafts_allowed=drafts, **by.stored())
        for (eps, drafts), by in counts.items()
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
    assert isinstance(calibration.config, DynaMoConfig)
    return calibration.config.sampling


PARTS = {
    "timing": Calibration.timing,
    "likelihood": likelihood,
    "dynamic": dynamic,
    "acceptance": acceptance,
    "vocabulary": vocabulary,
    "mask": mask,
}


def tables(parts: DynaMoParts) -> Iterator[str]:
    """Markdown of what was measured."""
    measured = parts.likelihood
    n = len(measured["ppl_n"])
    yield "Perplexities on the data (DynaMo, Table 2)"
    names = [*(f"PPL_{i}" for i in range(1, n + 1)), *(f"PPL_1:{i}" for i in range(2, n + 1))]
    yield table(names, [[*measured["ppl_n"], *measured["ppl_1:n"][1:]]])
    yield "Dynamic perplexity and share of n-grams against eps_b (DynaMo, Figs. 5 and 15)"
    grams = ["unigrams", "bigrams", "trigrams", "4-grams"][:n]
    rows = [
        [by["eps_b"], by["ppl_d"], f"{by['tokens_a_pass']:.3f}", *map(percent, by["share"])]
        for by in parts.dynamic["by_eps_b"]
    ]
    yield table(["eps_b", "PPL_d", "tokens a pass", *grams], rows)
    yield "Verified mode: drafts accepted a step (accepted / steps; rate = accepted / drafted)"
    header = ["eps_b", "most drafts", "rate", "drafted", "accepted"]
    rows = [[name, *cells, by.repeated_4_grams] for name, by in parts.acceptance.items() for cells in _cells(by)]
    yield table(["texts", *header, "repeated 4-grams"], rows)
    yield from vocabulary_table({size: (by.covers, by.rows) for size, by in parts.vocabulary.items()})
    if parts.mask:
        yield "Sampled texts, other powers alpha_c of the co-occurrence mask (DynaMo, eq. 6)"
        yield table(["alpha_c", *header], [[alpha, *cells] for alpha, by in parts.mask.items() for cells in _cells(by)])


def _cells(by: Rows) -> list[list[Any]]:
    return [
        [
            row.eps_b, row.drafts_allowed, percent(row.rate), f"{row.drafted / row.cycles:.3f}",
            f"{row.accepted / row.cycles:.3f}",
        ]
        for row in by.rows
    ]  # fmt: skip

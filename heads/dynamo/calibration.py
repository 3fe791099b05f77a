# SPDX-License-Identifier: Apache-2.0
"""Measurements of DynaMo heads: perplexities (eq. 4), PPL_d and shares of n-grams by eps_b, expected acceptance."""

from collections.abc import Iterator
from typing import Any

import torch

from vllm_ppd.heads.calibration.session import Calibration
from vllm_ppd.heads.calibration.text import Texts
from vllm_ppd.heads.dynamo.config import DynaMoParts, Row, Rows
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.measures import DynaMoMeasures
from vllm_ppd.heads.dynamo.module import DynaMoHeads
from vllm_ppd.heads.dynamo.recipe import new_layers
from vllm_ppd.heads.in_words import percent, table, vocabulary_table
from vllm_ppd.heads.training.tokens import Batch

DYNAMIC_TOKENS = 1024  # a joint of three heads has 125,000 entries per token


def dynamic(calibration: Calibration) -> dict[str, Any]:
    """PPL_d and the share of n-grams by eps_b (DynaMo, Figs. 5 and 15), on at most DYNAMIC_TOKENS of the data."""
    measures, settings = measures_of(calibration), calibration.config.sampling
    windows = calibration.windows[0]
    few = max(1, DYNAMIC_TOKENS // windows.input_ids.shape[1])
    batch = Batch(windows.input_ids[:few], windows.position_ids[:few])
    return {"by_eps_b": measures.dynamic_perplexity([batch], settings, calibration.options.eps)}


def acceptance(calibration: Calibration) -> dict[str, Rows]:
    """Expected acceptance in verified mode, by back-off threshold and drafts."""
    return {
        name: Rows(rows=_rows(calibration, texts), repeated_4_grams=texts.repeated_4_grams())
        for name, texts in calibration.texts()
    }


def vocabulary(calibration: Calibration) -> dict[int, Rows]:
    """Expected acceptance in verified mode on sampled texts with shorter draft vocabularies."""
    return {
        len(ids): Rows(rows=_rows(calibration, calibration.sampled, ids), covers=share)
        for ids, share in calibration.vocabularies()
    }


def mask(calibration: Calibration) -> dict[str, Rows]:
    """Expected acceptance in verified mode on sampled texts with other powers of the co-occurrence mask (eq. 6)."""
    has_mask, recommended = measures_of(calibration).ngrams is not None, calibration.config.sampling.alpha_c
    powers = [alpha for alpha in calibration.options.alphas if has_mask and alpha != recommended]
    return {f"{alpha:g}": Rows(rows=_rows(calibration, calibration.sampled, alpha_c=alpha)) for alpha in powers}


def _rows(calibration: Calibration, texts: Texts, token_ids: torch.Tensor | None = None, **changes: float) -> list[Row]:
    options, settings = calibration.options, calibration.config.sampling.model_copy(update=changes)
    counts = measures_of(calibration).drafted(texts, settings, options.batch, options.eps, token_ids)
    return [
        Row(eps_b=eps, alpha_c=settings.alpha_c, drafts_allowed=drafts, **by.stored())
        for (eps, drafts), by in counts.items()
    ]


def measures_of(calibration: Calibration) -> DynaMoMeasures:
    target = calibration.target
    heads = DynaMoHeads(new_layers(target, calibration.config.tokens))
    heads.load(calibration.tensors)
    heads.to(target.device, target.dtype).eval()
    counts = CoOccurrence.from_tensors(calibration.tensors)
    ngrams = None if counts is None else counts.ngrams.to(target.device)
    return DynaMoMeasures(target, heads, ngrams, calibration.autocast)


PARTS = {
    "timing": Calibration.timing,
    "likelihood": lambda calibration: measures_of(calibration).perplexities(calibration.windows),
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
    yield table(["eps_b", "PPL_d", "tokens per pass", *grams], rows)
    yield "Verified mode: drafts accepted per step (accepted / steps; rate = accepted / drafted)"
    header = ["eps_b", "most drafts", "rate", "drafted", "accepted"]
    rows = [[name, *cells, by.repeated_4_grams] for name, by in parts.acceptance.items() for cells in _cells(by)]
    yield table(["texts", *header, "repeated 4-grams"], rows)
    yield from vocabulary_table({size: (by.covers, by.rows) for size, by in parts.vocabulary.items()})
    if parts.mask:
        yield "Sampled texts, other powers alpha_c of the co-occurrence mask (DynaMo, eq. 6)"
        yield table(["alpha_c", *header], [[alpha, *cells] for alpha, by in parts.mask.items() for cells in _cells(by)])


def _cells(by: Rows) -> list[list[Any]]:
    per_step = [(row, f"{row.drafted / row.cycles:.3f}", f"{row.accepted / row.cycles:.3f}") for row in by.rows]
    return [[row.eps_b, row.drafts_allowed, percent(row.rate), *counts] for row, *counts in per_step]

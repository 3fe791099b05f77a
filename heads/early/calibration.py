# SPDX-License-Identifier: Apache-2.0
"""Measurements of early heads: p(layer, k, position), trained or not (PPD, Tables 2, 5 to 8), and acceptance."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vllm_ppd.heads.calibration.replay import Drafted, replay
from vllm_ppd.heads.calibration.session import Calibration
from vllm_ppd.heads.calibration.text import Texts, ahead, log_prob_of, ranked
from vllm_ppd.heads.early.config import FORMS, EarlyParts, Matches, Rates
from vllm_ppd.heads.early.module import EarlyHeads
from vllm_ppd.heads.in_words import percent, table
from vllm_ppd.heads.measured import Counts
from vllm_ppd.heads.training.target import Target

TOP_K, TOP_P = 3, 0.95  # PPD, appendix B
BUCKETS = 8  # of token positions, as in PPD's Tables 6 to 8


@dataclass
class ExitMatches:
    """Raw results on some texts; axis `forms` is untrained and trained, axis `positions` the generated tokens."""

    layers: tuple[int, ...]
    ks: tuple[int, ...]
    hits: torch.Tensor  # [forms, layers, ks, texts, positions] bool, whether the token was among the exit's k likeliest
    valid: torch.Tensor  # [texts, positions] bool, whether there is a token
    accept: torch.Tensor  # [forms, layers, texts, positions] probability that a draft of that token is accepted
    lengths: torch.Tensor  # [texts]

    def rate(self, form: int, layer: int, k: int, positions: slice | None = None) -> float:
        """p_correct: share of tokens among the k best of the exit."""
        where = slice(None), positions or slice(None)
        hits = self.hits[form, self.layers.index(layer), self.ks.index(k)]
        return float(hits[where].sum() / self.valid[where].sum().clamp(min=1))

    def drafted(self, form: int, layer: int, n: int) -> Drafted:
        """An engine's expected counts on these texts with n drafts at this exit."""
        accept = self.accept[form, self.layers.index(layer)]  # [texts, positions]
        return replay(ahead(accept, range(1, n + 1)), self.lengths)


@torch.no_grad()
def match_exits(
    target: Target, heads: EarlyHeads, texts: Texts, ks: tuple[int, ...], batch: int, autocast: Any
) -> ExitMatches:
    """Read every exit with a head at every generated token, with and without the head.

    The token is the one that the target wrote, greedy or sampled, so the match rate is PPD's p_correct for that way of
    decoding; `accept` is 0 or 1 for greedy texts and min(1, q/p) at the texts' temperature for sampled ones.
    """
    layers = heads.exit_layers
    steps = texts.generated.shape[1]
    valid = texts.valid()
    hits = torch.zeros(len(FORMS), len(layers), len(ks), len(texts.ids), steps, dtype=torch.bool)
    accept = torch.zeros(len(FORMS), len(layers), len(texts.ids), steps)
    for some, windows in texts.batches(batch):
        with autocast():
            states = target.run(windows, layers)
        rows = len(windows.input_ids)
        tokens, real = texts.generated[some].flatten(), valid[some]
        log_p = log_prob_of(target, texts.reading(states.final, windows), tokens, texts.temperature)
        for index, layer in enumerate(layers):
            hidden = texts.reading(states.exits[layer], windows)
            for form in range(len(FORMS)):
                with autocast():
                    read = hidden if form == 0 else heads(hidden, layer)
                whole = form == 1 and heads.form == "classifier"
                rank, log_q = ranked(target, read, tokens, texts.temperature, are_logits=whole)
                rank = rank.view(rows, steps)
                for at, k in enumerate(ks):
                    hits[form, index, at, some] = ((rank < k) & real).cpu()
                chance = (log_q - log_p).exp().clamp(max=1).view(rows, steps) if texts.temperature else (rank == 0)
                accept[form, index, some] = (chance.float() * real).cpu()
    return ExitMatches(layers, ks, hits, valid.cpu(), accept, texts.lengths.cpu())


def position_buckets(steps: int) -> list[tuple[str, slice]]:
    """Eight ranges of generated positions, counted from 1."""
    edges = [round(steps * i / BUCKETS) for i in range(BUCKETS + 1)]
    return [
        (f"{first + 1}-{last}" if last - first > 1 else str(last), slice(first, last))
        for first, last in itertools.pairwise(edges) if last > first
    ]  # fmt: skip


def matches(calibration: Calibration) -> Matches:
    """p(layer, k), by position too, on greedy texts; expected acceptance on greedy and sampled texts."""
    heads, options = _early_heads(calibration), calibration.options
    measured = {name: _matches(calibration, heads, texts) for name, texts in calibration.texts()}
    greedy, buckets = measured["greedy"], position_buckets(options.new_tokens)
    return Matches(
        layers=list(heads.exit_layers),
        match=_rates(greedy),
        match_by_position={label: _rates(greedy, bucket) for label, bucket in buckets},
        acceptance={
            name: {
                form: {
                    layer: [Counts(**exits.drafted(f, layer, n).stored()) for n in range(1, options.drafts + 1)]
                    for layer in heads.exit_layers
                }
                for f, form in enumerate(FORMS)
            }
            for name, exits in measured.items()
        },
        repeated_4_grams={name: texts.repeated_4_grams() for name, texts in calibration.texts()},
    )


def sampling(calibration: Calibration) -> dict[str, Rates]:
    """PPD, Table 5: p_correct at k = 3 when the target decodes greedily, by top-k (3) and by top-p (0.95)."""
    heads = _early_heads(calibration)
    decoded = {
        "greedy": calibration.greedy,
        f"top-k ({TOP_K})": calibration.write(1.0, top_k=TOP_K),
        f"top-p ({TOP_P})": calibration.write(1.0, top_p=TOP_P),
    }
    return {name: _rates(_matches(calibration, heads, texts, (3,))) for name, texts in decoded.items()}


def _early_heads(calibration: Calibration) -> EarlyHeads:
    target = calibration.target
    return EarlyHeads.from_tensors(calibration.config, calibration.tensors).to(target.device, target.dtype)


def _matches(
    calibration: Calibration, heads: EarlyHeads, texts: Texts, ks: tuple[int, ...] | None = None
) -> ExitMatches:
    options = calibration.options
    return match_exits(calibration.target, heads, texts, ks or options.ks, options.batch, calibration.autocast)


def _rates(matches: ExitMatches, positions: slice | None = None) -> Rates:
    return {
        k: {
            form: [round(matches.rate(f, layer, k, positions), 4) for layer in matches.layers]
            for f, form in enumerate(FORMS)
        }
        for k in matches.ks
    }


PARTS = {"timing": Calibration.timing, "matches": matches, "sampling": sampling}


def tables(parts: EarlyParts) -> Iterator[str]:
    """Markdown of what was measured."""
    matches = parts.matches
    yield "Match rate by exit layer, greedy texts (PPD, Table 2; N untrained, Y trained)"
    yield table(["k", "trained", *matches.layers], list(_rows(matches.match)))
    for place, layer in enumerate(matches.layers):
        buckets = matches.match_by_position
        rows = [
            [k, form, *(percent(rates[k][form][place]) for rates in buckets.values())]
            for k in matches.match for form in FORMS
        ]  # fmt: skip
        yield f"Match rate by token position, exit layer {layer} (PPD, Tables 6 to 8)"
        yield table(["k", "trained", *buckets], rows)
    yield "Match rate by decoding method, k = 3 (PPD, Table 5)"
    rows = [[name, *cells] for name, rates in parts.sampling.items() for _, *cells in _rows(rates)]
    yield table(["decoding", "trained", *matches.layers], rows)
    for name, by_form in matches.acceptance.items():
        repeated = matches.repeated_4_grams[name]
        yield f"Expected acceptance length by drafts n, {name} texts (repeated 4-grams {repeated})"
        rows = [
            [form, layer, *(f"{counts.length:.3f}" for counts in by_drafts)]
            for form, by_layer in by_form.items() for layer, by_drafts in by_layer.items()
        ]  # fmt: skip
        yield table(["trained", "exit", *(f"n={n}" for n in range(1, len(rows[0]) - 1))], rows)


def _rows(rates: Rates) -> Iterator[list[Any]]:
    for k, forms in rates.items():
        for form, values in forms.items():
            yield [k, form, *map(percent, values)]

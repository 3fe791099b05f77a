# SPDX-License-Identifier: Apache-2.0
"""PPD's tables: match rates against a slow count."""

from __future__ import annotations

from typing import Any

import pytest
import tiny

from vllm_ppd.benchmarks.papers import ppd
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.table import PaperTable


def value(table: PaperTable, label: str, column: int) -> Any:
    (row,) = (row for row in table.rows if row.label == label)
    return (row.ours or row.theirs or ())[column]


def test_match_rates_are_those_of_a_slow_count(early: Context) -> None:
    table = ppd.match_rates(early)
    assert value(table, "SQUAD, k = 5, Y", ppd.theirs.LAYERS.index(20)) == pytest.approx(2 * (1 - 0.629), abs=1e-3)
    target, texts = early.target, early.texts(early.task)
    heads, depth = ppd.early_heads(early), tiny.LAYERS
    assert all(f"of {depth}" in column for column in table.columns)
    layer = min(heads.exit_layers, key=lambda layer: abs(layer - depth / 2))
    states = target.model(texts.ids, output_hidden_states=True).hidden_states[layer]
    for form, read in (("N", target.norm(states)), ("Y", heads(target.norm(states), layer))):
        best = (read @ target.unembedding.T).topk(3).indices[:, texts.prompt - 1 : -1]
        hit = (best == texts.generated[..., None]).any(-1) & texts.valid()
        share = float(hit.sum() / texts.valid().sum())
        assert value(table, f"patterns, k = 3, {form}", ppd.theirs.LAYERS.index(20)) == pytest.approx(share)

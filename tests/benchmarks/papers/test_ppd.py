# SPDX-License-Identifier: Apache-2.0
"""PPD's tables: match rates against a slow count, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny

from vllm_ppd.benchmarks.harness.options import named
from vllm_ppd.benchmarks.papers import ppd
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.options import TablesOptions
from vllm_ppd.benchmarks.papers.published import PPD, rates_of
from vllm_ppd.benchmarks.papers.table import Missing, PaperTable


def value(table: PaperTable, label: str, column: int) -> Any:
    (row,) = (row for row in table.rows if row.label == label)
    return (row.ours or row.theirs or ())[column]


def test_published_rates_give_the_figures_that_the_paper_quotes() -> None:
    squad, wmt = rates_of("SQUAD"), rates_of("WMT EN-FR")
    assert round(1 - squad[20, 5, "Y"][-1] / 2, 3) == 0.629
    assert round(1 - wmt[20, 1, "N"][-1] / 2, 3) == 0.892
    for rates in (squad, wmt, rates_of("CNN/DM")):
        assert len(rates) == 30 and all(len(values) == 9 for values in rates.values())
        # Total is the mean of eight ranges of the same width, but for a misprint of the paper's.
        off = [key for key, (*ranges, total) in rates.items() if abs(sum(ranges) / 8 - total) > 1e-3]
        assert len(off) <= 1, off


def test_match_rates_are_those_of_a_slow_count(early: Context) -> None:
    table = ppd.match_rates(early)
    target, texts = early.target, early.texts(early.task)
    heads, depth = ppd.early_heads(early), tiny.LAYERS
    assert all(f"of {depth}" in column for column in table.columns)
    layer = min(heads.exit_layers, key=lambda layer: abs(layer - depth / 2))
    states = target.model(texts.ids, output_hidden_states=True).hidden_states[layer]
    for form, read in (("N", target.norm(states)), ("Y", heads(target.norm(states), layer))):
        best = (read @ target.unembedding.T).topk(3).indices[:, texts.prompt - 1 : -1]
        hit = (best == texts.generated[..., None]).any(-1) & texts.valid()
        share = float(hit.sum() / texts.valid().sum())
        assert value(table, f"patterns, k = 3, {form}", PPD.LAYERS.index(20)) == pytest.approx(share)


def test_figures_follow_from_match_rates(early: Context) -> None:
    figure, per_token = ppd.trade_off(3, early), ppd.trade_off(4, early)
    assert value(figure, 'SQUAD+"tr", k = 5', 0) == pytest.approx(4.973, abs=1e-3)
    assert value(figure, "WMT, k = 1", 0) == pytest.approx(1.561, abs=1e-3)
    curves = {curve.label: curve for curve in figure.curves}
    assert len(curves) == 8 and len(curves['patterns+"tr"'].ours or ()) == 3
    time, latency = value(figure, "patterns, k = 3", 0), value(figure, "patterns, k = 3", 1)
    assert value(per_token, "patterns, k = 3", 0) == pytest.approx(time * latency)


def test_sampling_is_beside_greedy_decoding(early: Context) -> None:
    table = ppd.by_decoding(early)
    layer = ppd.nearest(ppd.early_heads(early).exit_layers, 20, tiny.LAYERS)
    assert value(table, "patterns, Greedy decoding", 1) == ppd.matches(early, early.task).rate(1, layer, 3)
    assert value(table, "Greedy decoding", 2) == 0.4084 and len(table.claims) == 2


def test_positions_are_of_the_task_that_stands_for_the_data_set(options: Callable[..., TablesOptions]) -> None:
    """Tables 6 to 8 are of a task each: what stands for no data set is in none of them."""
    (path,) = (named(task)[1] for task in options().task)
    context = Context(options(task=(f"patterns={path}", f"summarization={path}")))
    ours = ppd.by_position("CNN/DM", 8, context).rows[0].ours
    assert ours is not None and ours[0] == ours[-1] and set(ours[1:-1]) == {None}  # beyond the texts
    assert ours[-1] == value(ppd.match_rates(context), "summarization, k = 1, N", 0)
    for data_set, number in (("SQUAD", 6), ("WMT EN-FR", 7)):
        with pytest.raises(Missing, match=f"no task stands for {data_set}: give --task .*=FILE"):
            ppd.by_position(data_set, number, context)

# SPDX-License-Identifier: Apache-2.0
"""ParaDecode's tables: what is read of exits without engines, and a run of all engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from vllm_ppd.benchmarks.papers import ppd
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.options import TablesOptions
from vllm_ppd.benchmarks.papers.paradecode import predictions, unverified
from vllm_ppd.benchmarks.papers.published import PARADECODE
from vllm_ppd.benchmarks.papers.run import make_tables
from vllm_ppd.benchmarks.papers.tasks import Task
from vllm_ppd.heads.calibration.text import generate
from vllm_ppd.heads.early.module import EarlyHeads


def test_early_predictions_are_rejected_where_exits_do_not_match(early: Context) -> None:
    calibration = early.calibration(early.heads("early")[0])
    exits = predictions(calibration, ppd.early_heads(early), early.texts(early.task), 2)
    rate, rejected = exits.rates(0.0)
    assert rate == 1 and rejected == pytest.approx(1 - ppd.matches(early, early.task).rate(1, 2, 1))
    fewer, _ = exits.rates(float(exits.confidence.median()))
    assert 0 < fewer < 1 and exits.rates(1.0) == (0, None)


def test_unverified_text_of_the_last_layer_is_the_targets(early: Context) -> None:
    calibration = early.calibration(early.heads("early")[0])
    last = EarlyHeads((tiny.LAYERS,), calibration.target.hidden_size)
    assert unverified(calibration, last, early.texts(early.task), tiny.LAYERS) == 1
    ids, starts = Task("unequal", "", [[5], [9, 3, 4, 8, 7], [1, 2, 3]]).padded(calibration.target.device)
    texts = generate(calibration.target, ids, 6, starts=starts)
    assert unverified(calibration, last, texts, tiny.LAYERS) == 1
    assert unverified(calibration, ppd.early_heads(early), early.texts(early.task), 1) < 1
    again = generate(calibration.target, ids, 6, starts=starts)
    assert again.ids.tolist() == texts.ids.tolist()  # the target is left as it was


@pytest.mark.full
def test_all_engines_are_measured(
    options: Callable[..., TablesOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PARADECODE, "GAMMAS", (0.0, 1.0))  # an engine each
    tables, left_out = make_tables(options(out=str(tmp_path / "speeds.json"), only="paradecode", new_tokens=24))
    assert not left_out and [table.key for table in tables] == [f"paradecode-{n}" for n in ("1", "2", "3", "fig-6")]
    rows = {(table.key, row.label): row.ours or () for table in tables for row in table.rows}
    assert rows["paradecode-2", "ParaDecode (Ours), given model"][0] == "100.00%"
    assert tables[0].columns[0] == "patterns"
    assert isinstance(share := rows["paradecode-3", "w/o verification step"][0], float) and share < 1
    assert rows["paradecode-fig-6", "gamma = 0"][1] == 1
    turns = json.loads((tmp_path / "speeds.turns.json").read_text())
    assert all(run["finished"] for run in turns["runs"])

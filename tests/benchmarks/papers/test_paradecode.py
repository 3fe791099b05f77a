# SPDX-License-Identifier: Apache-2.0
"""ParaDecode's tables, of a run of all engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_ppd.benchmarks.papers import paradecode
from vllm_ppd.benchmarks.papers.options import TablesOptions
from vllm_ppd.benchmarks.papers.run import make_tables


@pytest.mark.full
def test_all_engines_are_measured(
    options: Callable[..., TablesOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paradecode.theirs, "GAMMAS", (0.0, 1.0))  # an engine each
    tables, left_out = make_tables(options(out=str(tmp_path / "speeds.json"), only="paradecode", new_tokens=24))
    assert not left_out and [table.key for table in tables] == [f"paradecode-{n}" for n in ("1", "2", "fig-6")]
    rows = {(table.key, row.label): row.ours or () for table in tables for row in table.rows}
    assert rows["paradecode-2", "ParaDecode (Ours), given model"][0] == "100.00%"
    assert tables[0].columns[0] == "patterns"
    assert 0 <= rows["paradecode-fig-6", "gamma = 0"][1] <= 1
    turns = json.loads((tmp_path / "speeds.turns.json").read_text())
    assert all(run["finished"] for run in turns["runs"])

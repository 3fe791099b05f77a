# SPDX-License-Identifier: Apache-2.0
"""docs/papers.md is what the code makes of it, and names every table that can be measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_ppd.benchmarks.papers import coverage
from vllm_ppd.benchmarks.papers.run import PAPERS


def test_page_is_up_to_date() -> None:
    assert coverage.PAGE.read_text() == coverage.page(), "run python -m vllm_ppd.benchmarks.papers.coverage"


def test_every_table_is_listed() -> None:
    listed = {reference for paper in coverage.items().values() for _, _, state, reference in paper["items"]
              if state == "measured"}  # fmt: skip
    assert listed == {key for paper in PAPERS.values() for key in paper.TABLES}


@pytest.mark.parametrize(
    ("paper", "kind", "count"),
    [
        ("ppd", "Table", 8), ("ppd", "Figure", 4), ("ppd", "Algorithm", 2),
        ("paradecode", "Table", 3), ("paradecode", "Figure", 6), ("paradecode", "Algorithm", 1),
        ("cp", "Table", 3), ("cp", "Figure", 5), ("cp", "Algorithm", 1),
        ("dynamo", "Table", 14), ("dynamo", "Figure", 24), ("dynamo", "Algorithm", 1),
    ],
)  # fmt: skip
def test_no_table_figure_or_algorithm_is_missing(paper: str, kind: str, count: int) -> None:
    named: set[int] = set()
    for where, *_ in coverage.items()[paper]["items"]:
        for first, last in re.findall(rf"{kind}s? (\d+)(?:(?: to |, )(\d+))?", where):
            named |= set(range(int(first), int(last or first) + 1))
    assert named == set(range(1, count + 1))


def test_a_reference_to_nothing_is_found(tmp_path: Path) -> None:
    for state, reference in (
        ("measured", "ppd-9"), ("implemented", "heads.cp:Nothing"),
        ("setting", "heads.cp.config:CPOptions.nothing"),
    ):  # fmt: skip
        with pytest.raises(KeyError):
            coverage.cell(state, reference)
    assert coverage.cell("setting", "heads.cp.config:CPOptions.rank") == "`rank`, default 3"

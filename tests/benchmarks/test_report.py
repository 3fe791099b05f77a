# SPDX-License-Identifier: Apache-2.0
"""Tables of results: ratios within a round, accepted drafts, and every stored file."""

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, cells_of

from vllm_ppd.benchmarks import pictures
from vllm_ppd.benchmarks.report import (
    MARKS,
    RESULTS,
    acceptance_table,
    category_table,
    page,
    speed_table,
    speed_up,
)
from vllm_ppd.benchmarks.storage import BASE


def run_of(*turns: dict[str, Any], temperature: float = 0.0) -> dict[str, Any]:
    names = dict.fromkeys(turn["contender"] for turn in turns)
    return {
        "options": {"temperature": temperature},
        "contenders": names,
        "turns": list(turns),
    }


def timed(name: str, number: int, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        "contender": name,
        "batch": 2,
        "round": number,
        "window_tokens": tokens,
        "window_seconds": seconds,
        "steps": 10,
        "draft_tokens": 30,
        "accepted_tokens": 15,
        "same_tokens": 9,
        "compared_tokens": 10,
        "peak_bytes": None,
    }


def test_ratios_are_paired_by_round() -> None:
    """The machine is twice as slow in round 1; the ratio does not change, the tokens
    per second do.
    """
    run = run_of(
        *(
            timed(name, number, tokens, 1.0 + number)
            for name, tokens in ((BASE, 20), ("a", 30))
            for number in range(2)
        )
    )
    assert speed_up(run, "a", 2) == pytest.approx((1.5, 1.5, 1.5))
    assert speed_up(run, "a", 4) is None
    header, base, ours = cells_of(speed_table(run))
    assert header == ["system", "batch 2", "accepted", "same tokens"]
    assert base[:2] == [BASE, "15.0 tokens/s"]
    assert ours == ["a", "1.50 (1.50 to 1.50)", "0.50", "90.00%"]


def test_an_interval_covers_the_rounds() -> None:
    turns = [
        timed(name, number, 10 + growth * number, 1.0)
        for name, growth in ((BASE, 0), ("a", 1))
        for number in range(5)
    ]
    estimate = speed_up(run_of(*turns), "a", 2)
    assert (
        estimate is not None
        and 1.0 <= estimate.low < estimate.value == 1.2 < estimate.high <= 1.4
    )


def part(
    name: str, number: int, category: str, accepted: int, differ: list[int]
) -> dict[str, Any]:
    return {
        "contender": name,
        "part": number,
        "category": category,
        "prompts": 2,
        "steps": 5,
        "request_steps": 10,
        "draft_tokens": 20,
        "accepted_tokens": accepted,
        "accepted_lengths": [10 - accepted, accepted],
        "differ": differ,
    }


def test_acceptance_by_system_and_category() -> None:
    run = run_of(
        part(
            "a",
            0,
            "qa",
            4,
            [],
        ),
        part(
            "a",
            1,
            "code",
            6,
            [1],
        ),
        part("b", 0, "qa", 2, []),  # its other turn is to come
    )
    assert cells_of(acceptance_table(run))[1] == [
        "a",
        "3 of 4",
        "0.50 (0.40 to 0.60)",
        "0.50",
        "2.00",
    ]
    assert cells_of(category_table(run)) == [
        ["accepted", "code", "qa"],
        ["a", "0.60", "0.40"],
        ["b", "-", "0.20"],
    ]
    run["options"]["temperature"] = 0.8
    assert "same text" not in acceptance_table(run)


PAGES = sorted(RESULTS.glob("*.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_pages_have_the_stored_results(path: Path) -> None:
    text = path.read_text()
    assert page(text) == text, "python -m vllm_ppd.benchmarks.report --page"


def test_every_result_is_on_one_page() -> None:
    named = [
        name for path in PAGES for _, name, _ in MARKS.findall(path.read_text())
    ]
    stored = [path.stem for path in RESULTS.glob("*.json")]
    assert sorted(named) == sorted([*stored, "predicted"])


def test_documented_intervals_are_stored() -> None:
    stored = "".join(path.read_text() for path in PAGES)
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for interval in re.findall(
            r"\d\.\d\d \([\d.]+ to [\d.]+\)", path.read_text()
        ):
            assert interval in stored, f"{path}: {interval}"


def test_pictures(tmp_path: Path) -> None:
    """All are drawn, and those in the tree have the same texts."""
    pictures.main(tmp_path)
    drawn = {path.name: texts_of(path) for path in tmp_path.iterdir()}
    kept = {path.name: texts_of(path) for path in (RESULTS / "plots").iterdir()}
    assert drawn == kept


def texts_of(path: Path) -> list[str]:
    return re.findall("<text[^>]*>([^<]+)</text>", path.read_text())

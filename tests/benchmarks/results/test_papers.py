# SPDX-License-Identifier: Apache-2.0
"""docs/papers.md names every table, figure and algorithm of the papers, and what it refers to is there."""

import ast
import json
import re
from collections import Counter
from typing import Any

import pytest
from conftest import ROOT, cells_of
from pydantic import BaseModel

from vllm_ppd.benchmarks import evidence
from vllm_ppd.benchmarks.decode.options import DecodeOptions
from vllm_ppd.heads.cp.config import CPOptions
from vllm_ppd.heads.dynamo.config import DynaMoOptions, JointSettings
from vllm_ppd.heads.early.config import EarlyOptions
from vllm_ppd.heads.kinds import calibration_of
from vllm_ppd.vllm_plugins.config.options import DraftingOptions

_, CLAIMED, SUMMARY, *SECTIONS = re.split(r"^## .*\n", (ROOT / "docs" / "papers.md").read_text(), flags=re.MULTILINE)
PAPERS = {"ppd": "early", "paradecode": "early", "cp": "cp", "dynamo": "dynamo"}  # and their kind of heads
ITEMS = {
    paper: cells_of(section)[1:] for paper, section in zip(PAPERS, SECTIONS, strict=True)
}  # where, what, state, here
STATES = ("measured", "implemented", "setting", "left out")
OPTIONS: dict[str, type[BaseModel]] = {
    cls.__name__: cls for cls in (DecodeOptions, CPOptions, DynaMoOptions, EarlyOptions, JointSettings, DraftingOptions)
}


def here(state: str) -> list[str]:
    return [item[3] for items in ITEMS.values() for item in items if item[2] == state]


@pytest.mark.parametrize("paper", PAPERS)
def test_what_is_measured_names_its_command(paper: str) -> None:
    references = [item[3] for item in ITEMS[paper] if item[2] == "measured"]
    assert references
    for reference in references:
        if kept := re.fullmatch(r"`(.+\.json)`, commit [0-9a-f]{7}", reference):  # by code that is gone
            assert (ROOT / kept[1]).is_file()
            continue
        command, part = re.fullmatch(r"`(ppd calibrate|make evidence)`, `(\w+)`", reference).groups()  # type: ignore[union-attr]
        assert part in (evidence.parts("data") if command == "make evidence" else calibration_of(PAPERS[paper]).PARTS)


def test_each_paper_has_a_claim_with_our_figure_and_a_verdict() -> None:
    header, *claims = cells_of(CLAIMED)
    assert header == ["paper", "claim", "the paper", "here", "holds", "why"]
    assert {claim[0].split(",")[0] for claim in claims} == {"PPD", "ParaDecode", "CP heads", "DynaMo"}
    for *_, theirs, ours, holds, why in claims:
        assert re.search(r"\d", theirs) and re.search(r"\d", ours) and holds in ("yes", "partly", "no", "not decided")
        assert holds == "yes" or why


@pytest.mark.parametrize("reference", here("implemented"))
def test_what_is_implemented_is_there(reference: str) -> None:
    path, name = re.fullmatch(r"`(.+\.py)`, `(\w+)`", reference).groups()  # type: ignore[union-attr]
    body = ast.parse((ROOT / path).read_text()).body
    assert name in {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


@pytest.mark.parametrize("reference", here("setting"))
def test_settings_have_these_defaults(reference: str) -> None:
    cls, field, default = re.fullmatch(r"`(\w+)\.(\w+)`, default (.+)", reference).groups()  # type: ignore[union-attr]
    value: Any = OPTIONS[cls].model_fields[field].default
    assert default == (value if isinstance(value, str) else json.dumps(value))


def test_the_summary_counts_the_items() -> None:
    counts = [Counter(item[2] for item in items) for items in ITEMS.values()]
    assert [row[1:] for row in cells_of(SUMMARY)[1:]] == [[str(count[state]) for state in STATES] for count in counts]


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
    for where, *_ in ITEMS[paper]:
        for first, last in re.findall(rf"{kind}s? (\d+)(?:(?: to |, )(\d+))?", where):
            named |= set(range(int(first), int(last or first) + 1))
    assert named == set(range(1, count + 1))

# SPDX-License-Identifier: Apache-2.0
"""The page of results is what its command makes of the committed files, and knows the files that come later."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from bench_turns import serve_options, serve_turn
from conftest import ROOT, cells_of

from vllm_ppd.benchmarks.harness.contenders import BASE, contenders
from vllm_ppd.benchmarks.harness.results import Results
from vllm_ppd.benchmarks.results import page

RESULTS = ROOT / "benchmarks" / "results"


def test_committed_page_is_what_the_command_makes() -> None:
    sections = page.sections.all_sections(RESULTS)
    tables = page.all_tables(sections, RESULTS)
    for document in page.documents():
        assert page.with_tables(document, tables) == document.read_text(), f"{document} is old, as below"
    made = page.contents(sections)
    assert {f"plots/{path.name}" for path in (RESULTS / "plots").iterdir()} | {"README.md"} == made.keys()
    for path, text in made.items():
        assert (RESULTS / path).read_text() == text, f"{path} is old; run python -m vllm_ppd.benchmarks.results.page"


def test_turns_become_a_section(tmp_path: Path) -> None:
    given = serve_options(out=str(tmp_path / "serve.json"), also=('ours={"method": "ppd"}',))
    results = Results(given, contenders(given))
    for load in ({}, {"rate": None, "concurrency": 4}):
        results.add(serve_turn(BASE, 0, 1.0, **load))
        results.add(serve_turn("ours", 0, 0.5, **load, drafts=10, draft_tokens=30, accepted_tokens=15))
    (tmp_path / "other.json").write_text(json.dumps({"rows": [{"a": 1}, {"b": 2}]}))
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results: serve -->\nold\n<!-- end -->\nafter\n")
    sections = page.sections.all_sections(tmp_path)
    tables = page.all_tables(sections, tmp_path)
    made, filled = page.contents(sections), page.with_tables(readme, tables)
    text = made["README.md"]
    assert text.index("## Servers under load") < text.index("![Servers under load](plots/serve.svg)")
    assert "The newest run was stopped before its end." in text
    assert re.search(r"\| +a \| +b \|", text)
    assert [row[:2] for row in cells_of(filled)[1:]] == [
        ["2 a second", "vLLM"], ["2 a second", "ours"], ["4 at once", "vLLM"], ["4 at once", "ours"],
    ]  # fmt: skip
    assert filled.startswith("before\n") and filled.endswith("<!-- end -->\nafter\n")
    drawn = made["plots/serve.svg"]
    assert drawn == page.contents(page.sections.all_sections(tmp_path))["plots/serve.svg"]
    assert all(
        word in drawn
        for word in ("ours", "latency, 4 at once", "vLLM / contender", results.run["machine"].split(",")[0])
    )
    with pytest.raises(SystemExit, match="asks for results 'nothing'; there are serve, other"):
        readme.write_text(readme.read_text().replace("serve", "nothing"))
        page.with_tables(readme, tables)

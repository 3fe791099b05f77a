# SPDX-License-Identifier: Apache-2.0
"""`ppd bench tables`: which tables are measured, what their file holds, and how they read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import cells_of

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.session import Stopped
from vllm_ppd.benchmarks.papers import ppd
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.options import TablesOptions
from vllm_ppd.benchmarks.papers.run import chosen, make_tables
from vllm_ppd.benchmarks.papers.table import PaperTable, Row, Verdict, claims, render
from vllm_ppd.vllm_plugins.cli.main import main


def keys(out: Path) -> list[str]:
    return [entry["key"] for entry in json.loads(out.read_text())["tables"]]


def test_tables_are_added_to_their_file(options: Callable[..., TablesOptions], tmp_path: Path) -> None:
    out = tmp_path / "tables.json"

    def run(**changes: Any) -> list[str]:
        make_tables(options(out=str(out), **changes))
        return keys(out)

    assert run(only="ppd-2") == ["ppd-2"]
    first = json.loads(out.read_text())["tables"][0]
    assert first["versions"] and first["identity"]["options"]["prompts"] == 4
    assert run(only="ppd-2") == ["ppd-2"]
    assert run(only="ppd-2", seed=1) == ["ppd-2"] * 2
    assert run(only="ppd-2", again=True) == ["ppd-2"] * 3
    assert json.loads(out.read_text())["tables"][0] == first
    (table,), _ = make_tables(options(out=str(out), only="ppd-2"))
    assert table == PaperTable.model_validate(table.model_dump(mode="json"))
    text = claims([out])  # of the newest of each table alone
    assert text.startswith("## The papers' claims on `") and text.count("The match rate rises with k ") == 1


def test_stopped_run_keeps_its_tables(
    options: Callable[..., TablesOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: Context) -> PaperTable:
        raise KeyboardInterrupt

    monkeypatch.setitem(ppd.TABLES, "ppd-3", stop)
    out = tmp_path / "tables.json"
    with pytest.raises(Stopped, match=r"stopped at ppd-3; 1 new tables are kept in .*tables\.json"):
        make_tables(options(out=str(out), only="ppd-2,ppd-3"))
    assert keys(out) == ["ppd-2"]


def test_missing_heads_and_bad_names_are_refused(
    options: Callable[..., TablesOptions], tmp_path: Path, capsys: Any
) -> None:
    none = options(heads=(), only="ppd-2", out=str(tmp_path / "none.json"))
    tables, left_out = make_tables(none)
    assert not tables and "ppd train early" in left_out["ppd-2"] and not Path(none.out).exists()
    with pytest.raises(BenchError, match="--only ppd-9: no such table; there are ppd-2, "):
        chosen(("ppd-9",))
    assert list(chosen(("paradecode",))) == [f"paradecode-{name}" for name in ("1", "2", "fig-6")]
    other = tmp_path / "other.json"
    other.write_text('{"benchmark": "decode"}')
    flags = ["--model", none.model, "--task", *none.task, "--only", "ppd-2", "--out", str(other)]
    assert main(["bench", "tables", *flags]) != 0
    assert "no file of tables" in capsys.readouterr().err


def test_ours_stands_above_the_papers() -> None:
    rows = (Row("same", [1.0, None], [0.5, "x"]), Row("apart", [None, 0.25], [2.0, None]))
    table = PaperTable(
        key="p-1", paper="P", title="Table 1: things", columns=("a", "b"), rows=rows, note="Note.",
        forms=("{:.1f}", "{:.0%}"), settings={"rounds": 3}, claims=(Verdict("It rises", False, "1 to 0"),),
    )  # fmt: skip
    text = render(table)
    assert cells_of(text)[1:] == [
        ["same", "ours", "1.0", "-"],
        ["", "paper", "0.5", "x"],
        ["apart", "both", "2.0", "25%"],
    ]
    assert text.startswith("### P, Table 1: things (`p-1`)")
    assert text.endswith("Note. Settings: rounds 3.\n\n- It rises: does not hold (1 to 0).")
    with pytest.raises(ValueError, match="1 values for 2 columns"):
        PaperTable(key="p-1", paper="P", title="", columns=("a", "b"), rows=(Row("short", [1.0]),), note="")

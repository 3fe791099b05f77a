# SPDX-License-Identifier: Apache-2.0
"""--out in a folder that is not there yet: benchmarks make it before they measure, and write into it at the end."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "benchmarks" / "demo"))
import acceptance
import engines
import fleet_check
import prediction
import side_by_side


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "not" / "there" / "out.json"


def test_costs(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    engines.model_arguments(parser, layers=2, hidden=64, vocab=100)
    monkeypatch.setattr(sys, "argv", ["cycle_cost.py", "--out", str(out)])
    engines.report(parser, lambda args: [{"there": out.parent.is_dir()}], lambda result: None)
    assert json.loads(out.read_text())["rows"] == [{"there": True}]


def test_acceptance(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> list[dict[str, Any]]:
        return [{"setting": "greedy", "there": out.parent.is_dir(), **dict.fromkeys(acceptance.COLUMNS, 0)}]

    monkeypatch.setattr(acceptance, "measure", measure)
    monkeypatch.setattr(acceptance, "prompts", lambda count: [])
    monkeypatch.setattr(sys, "argv", ["acceptance.py", "--exit-layers", "6", "--out", str(out)])
    acceptance.main()
    assert {row["there"] for row in json.loads(out.read_text())["rows"]} == {True}


@pytest.mark.parametrize("script", [prediction, fleet_check])
def test_what_reads_results(script: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "stored", lambda path: sys.exit(f"{out.parent.is_dir()}"))
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", "results.json", "--out", str(out)])
    with pytest.raises(SystemExit, match="True"):
        script.main()


def test_engines_side_by_side(out: Path) -> None:
    args = argparse.Namespace(model="model", out=out, steps=12)
    assert side_by_side.begun("never_slower", args, apart=())["cells"] == {}
    assert out.parent.is_dir()

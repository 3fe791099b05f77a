# SPDX-License-Identifier: Apache-2.0
"""The parts of a step add up to it, and an engine of each method is taken apart."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from conftest import cells_of

from vllm_ppd.benchmarks.decode.step_breakdown import DRAFTING, LAYERS, REST, REST_OF_DRAFTING, formula, row, table

COMMAND = [sys.executable, "-m", "vllm_ppd.benchmarks.decode.step_breakdown"]


def test_parts_add_up_to_the_step() -> None:
    """Drafting is 0.3 of which 0.2 are known; the heads' layers run outside of it."""
    found = row(2, "dynamo", (1.0, 0.9, 1.1), (1.8, 1.7, 2.0), {DRAFTING: 0.3, "joint": 0.2, LAYERS: 0.4})
    parts = found["parts_in_passes"]
    assert parts == pytest.approx({"joint": 0.2, LAYERS: 0.4, REST_OF_DRAFTING: 0.1, REST: 1.1})
    assert sum(parts.values()) == pytest.approx(found["step_in_passes"]) == 1.8
    assert (found["full_pass_ms"], found["step_ms"]) == ([1000.0, 900.0, 1100.0], [1800.0, 1700.0, 2000.0])
    args = Namespace(exit_layer=3, layers=12, drafts=3, vocab=100, hidden=10)
    assert formula("cp", args, 4000) == {}
    said = formula("early", args, 4000)  # the LM head is a quarter of the weights
    assert said == {"formula": 1.75, "formula_with_lm_head": round(3 * (0.75 * 0.25 + 0.25) + 1, 3)}
    (_, steps), (_, shown) = (cells_of(part) for part in table([found]).split("In units"))
    assert steps == ["2", "dynamo", "1000.00 (900.00-1100.00)", "1800.00 (1700.00-2000.00)", "1.8", "-", "-"]
    assert shown == ["2", "dynamo", "0.200", "0.400", "0.100", "1.100"]


@pytest.mark.full
@pytest.mark.engine
def test_engines_of_every_method(tmp_path: Path) -> None:
    out = tmp_path / "new" / "steps.json"
    sizes = ["--layers", "4", "--hidden", "64", "--vocab", "256", "--draft-vocab", "128", "--exit-layer", "2"]
    flags = ["--eager", "--dtype", "float32", "--steps", "3", "--turns", "1", "--kv-cache-gib", "0.03"]
    subprocess.run([*COMMAND, *sizes, *flags, "--out", str(out)], check=True, capture_output=True)
    rows = {found["method"]: found for found in json.loads(out.read_text())["rows"]}
    methods = [f"{kind}, {size}" for kind in ("cp", "dynamo") for size in ("128 tokens", "whole vocabulary")]
    assert list(rows) == ["early", *methods]
    for name, found in rows.items():
        parts = {part: value for part, value in found["parts_in_passes"].items() if not part.startswith("rest")}
        assert all(value > 0 for value in parts.values()), name
        assert len(parts) == {"e": 4, "c": 3, "d": 3}[name[0]]

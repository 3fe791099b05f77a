# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/step_prediction.py makes of its pairs of turns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from vllm_ppd.heads.calibration.recommend import Setting
from vllm_ppd.heads.planning.machine import Served
from vllm_ppd.heads.planning.predict import Drafting

sys.path.insert(0, str(ROOT / "benchmarks"))
import step_prediction
from side_by_side import BASE, Pair
from step_prediction import SEVERAL, even_length, row


def test_step_and_length_are_held_apart() -> None:
    """Pairs of two turns of 10 steps; the machine is half as fast in the second pair."""
    setting = Setting({}, drafts=2, drafted=2, length=1.5, layers=0, reads=0.5)
    machine = Served({"1": 0.05, "4": 0.05}, num_layers=4, head_share=0.2)
    way = Drafting("cp", {"num_speculative_tokens": 2}, 1.5, 1.0, setting, machine, 4)
    beside = [(40, 2.0), (40, 4.0)]  # tokens and seconds of vLLM alone
    pairs = {"cp": [Pair(24, 1.2, 20, *beside[0]), Pair(36, 2.4, 20, *beside[1])]}
    found = row("cp", way, pairs, steps=10, of_text=2)
    assert (found["length"], found["predicted length"]) == (1.5, 1.5)
    assert (found["step"], found["predicted step"]) == (1.2, pytest.approx(1.1))
    assert found["measured"] == 1.25
    assert found["measured / predicted"] == found["at the measured length"] == round(1.1 / 1.2, 3)
    pairs = {"cp": [Pair(20, 1.2, 20, *beside[0]), Pair(20, 2.4, 20, *beside[1])]}
    found = row("cp", way, pairs, steps=10, of_text=2)  # nothing was accepted
    assert found["measured / predicted"] == round(1.1 / 1.2 / 1.5, 3)
    assert found["at the measured length"] == round(1.1 / 1.2, 3)


def test_length_is_of_texts_that_are_equally_long() -> None:
    """One text takes a step a token, the other one for three; its pairs differ. 60 tokens of each: 60 and 20 steps."""
    pairs = [Pair(tokens, 1.0, 0, 40, 1.0) for tokens in (20, 20, 40, 80)]
    assert even_length(pairs, steps=10, of_text=2) == pytest.approx(120 / 80)


def test_a_further_run_takes_further_texts_and_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop alone: engines, prompts and predictions are given; the second run is stopped in its second text."""
    said: list[int] = []

    def turns(engines: dict[str, Any], prompts: dict[str, Any], *_: Any) -> dict[str, Any]:
        if len(said) == 3:
            raise KeyboardInterrupt
        said.append(prompts[BASE][0])
        return {name: [Pair(1, 1.0, 0, 1, 1.0)] for name in engines}

    monkeypatch.setattr(step_prediction, "with_huge_pages", lambda: None)
    monkeypatch.setattr(step_prediction, "calibration_of", lambda heads: None)
    monkeypatch.setattr(step_prediction, "Contender", lambda *_: None)
    monkeypatch.setattr(step_prediction, "read_prompts", lambda *_: list(range(10)))
    monkeypatch.setattr(step_prediction, "in_turns", turns)
    monkeypatch.setattr(step_prediction, "rows", lambda cells, *_: [{"pairs": len(cells["0.8"][BASE])}])
    out = tmp_path / "out.json"
    flags = ["--model", "m", "--heads", "cp", "--data", "d", "--out", str(out), "--pairs", "1", "--temperatures", "0.8"]
    monkeypatch.setattr(sys, "argv", ["step_prediction.py", *flags, "--texts", "2"])
    step_prediction.main()
    step_prediction.main()
    kept = json.loads(out.read_text())
    assert said == [0, 1, 2]
    assert {name: len(pairs) for name, pairs in kept["cells"]["0.8"].items()} == {
        BASE: 3,
        "vLLM, again": 3,
        "vLLM, 3": 3,
        SEVERAL: 3,
        "cp": 3,
    }
    assert kept["rows"] == [{"pairs": 3}]

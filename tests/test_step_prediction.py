# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/step_prediction.py makes of its pairs of turns."""

from __future__ import annotations

import sys

import pytest
from conftest import ROOT

from vllm_ppd.heads.calibration.recommend import Setting
from vllm_ppd.heads.planning.machine import Served
from vllm_ppd.heads.planning.predict import Drafting

sys.path.insert(0, str(ROOT / "benchmarks"))
from side_by_side import BASE
from step_prediction import row


def test_step_and_length_are_held_apart() -> None:
    """Pairs of two turns of 10 steps; the machine is half as fast in the second pair."""
    setting = Setting({}, drafts=2, drafted=2, length=1.5, layers=0, reads=0.5)
    machine = Served({"1": 0.05, "4": 0.05}, num_layers=4, head_share=0.2)
    way = Drafting("cp", {"num_speculative_tokens": 2}, 1.5, 1.0, setting, machine, 4)
    pairs = {BASE: [(20, 1.0, 0), (20, 2.0, 0)], "cp": [(24, 1.2, 20), (36, 2.4, 20)]}
    found = row("cp", way, pairs, steps=10)
    assert (found["length"], found["predicted length"]) == (1.5, 1.5)
    assert (found["step"], found["predicted step"]) == (1.2, pytest.approx(1.1))
    assert found["measured"] == 1.25
    assert found["measured / predicted"] == found["at the measured length"] == round(1.1 / 1.2, 3)
    found = row("cp", way, pairs | {"cp": [(20, 1.2, 20), (20, 2.4, 20)]}, steps=10)  # nothing was accepted
    assert found["measured / predicted"] == round(1.1 / 1.2 / 1.5, 3)
    assert found["at the measured length"] == round(1.1 / 1.2, 3)

# SPDX-License-Identifier: Apache-2.0
"""Steps with drafts, measured in pairs of turns, against what `ppd plan` predicts of them."""

from __future__ import annotations

import pytest

from vllm_ppd.benchmarks.decode.closed_loop import Pair
from vllm_ppd.benchmarks.decode.plan_check import even_length, step_row
from vllm_ppd.heads.calibration.recommend import Setting
from vllm_ppd.heads.planning.machine import Served
from vllm_ppd.heads.planning.predict import Drafting

OPTIONS = {"steps": 10, "rounds_a_text": 2}


def test_step_and_length_are_held_apart() -> None:
    """Pairs of two turns of 10 steps; the machine is half as fast in the second pair."""
    setting = Setting({}, drafts=2, drafted=2, length=1.5, layers=0, reads=0.5)
    machine = Served({"1": 0.05, "4": 0.05}, num_layers=4, head_share=0.2)
    way = Drafting("cp", {"num_speculative_tokens": 2}, 1.5, 1.0, setting, machine, 4)
    beside = [(40, 2.0), (40, 4.0)]  # tokens and seconds of vLLM alone
    pairs = [Pair(24, 1.2, 20, *beside[0]), Pair(36, 2.4, 20, *beside[1])]
    found = step_row("cp", way, pairs, OPTIONS)
    assert (found["length"], found["predicted length"]) == (1.5, 1.5)
    assert (found["step"], found["predicted step"]) == (1.2, pytest.approx(1.1))
    assert found["measured"] == 1.25
    assert found["measured / predicted"] == found["at the measured length"] == round(1.1 / 1.2, 3)
    pairs = [Pair(20, 1.2, 20, *beside[0]), Pair(20, 2.4, 20, *beside[1])]
    found = step_row("cp", way, pairs, OPTIONS)  # nothing was accepted
    assert found["measured / predicted"] == round(1.1 / 1.2 / 1.5, 3)
    assert found["at the measured length"] == round(1.1 / 1.2, 3)


def test_length_is_of_texts_that_are_equally_long() -> None:
    """One text takes a step a token, the other one for three; its pairs differ. 60 tokens of each: 60 and 20 steps."""
    pairs = [Pair(tokens, 1.0, 0, 40, 1.0) for tokens in (20, 20, 40, 80)]
    assert even_length(pairs, steps=10, of_text=2) == pytest.approx(120 / 80)

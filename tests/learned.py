# SPDX-License-Identifier: Apache-2.0
"""Learning from a few hundred positions, so that it happens within a test."""

from typing import Any

from vllm_ppd.vllm_plugins.draft_length import learning
from vllm_ppd.vllm_plugins.methods.learning import learner, pairs, speculator

SMALL = {"BLOCK": 64, "HELD": 256, "MARKS": (4, 8), "ROWS": 8, "COLUMNS": 12}


def learn_from_few(monkeypatch: Any) -> None:
    """Have the engines that start from here on learn from few positions."""
    for module in (learning, learner, pairs, speculator):
        for name, value in SMALL.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)

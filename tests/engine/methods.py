# SPDX-License-Identifier: Apache-2.0
"""A method each that starts from saved states, that drafts from a hidden state, and
that adds layers with KV.
"""

from typing import Any

import pytest
from cases import DYNAMO, PLAIN, VARIANTS
from conftest import DEMO
from vllm.platforms import current_platform

from vllm_ppd.vllm_plugins.engine.worker import DraftingWorker

METHODS: dict[str, dict[str, Any]] = {
    "early": {"method": "early", "exit_layer": 5},
    "cp": {"method": "cp", "heads": PLAIN},
    "dynamo": DYNAMO,
}
WITH_RECURRENT = METHODS | {"recurrent": VARIANTS["recurrent-short"]}

HEADS = DEMO.parent / "heads"
# The same with the demo model's heads
ON_DEMO: dict[str, dict[str, Any]] = {
    "early": {
        "method": "early",
        "model": str(HEADS / "early"),
        "exit_layer": 6,
        "num_speculative_tokens": 3,
    },
    "cp": {"method": "cp", "model": str(HEADS / "cp")},
    "dynamo": {
        "method": "dynamo",
        "model": str(HEADS / "dynamo"),
        "eps_b": 0.05,
    },
}


def imitate_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sleep lose the KV cache. The CPU build has no sleep mode of its own."""

    def sleep(self: Any, level: int = 1) -> None:
        for cache in self.model_runner.kv_caches:
            cache.fill_(42.0)

    monkeypatch.setattr(
        type(current_platform),
        "is_sleep_mode_available",
        lambda self: True,
    )
    monkeypatch.setattr(DraftingWorker, "sleep", sleep)
    monkeypatch.setattr(
        DraftingWorker,
        "wake_up",
        lambda self, tags=None: None,
    )

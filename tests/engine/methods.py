# SPDX-License-Identifier: Apache-2.0
"""A method each that starts from saved states, that drafts from a hidden state, and
that adds layers with KV.
"""

from typing import Any

from cases import DYNAMO, PLAIN, VARIANTS
from conftest import DEMO

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

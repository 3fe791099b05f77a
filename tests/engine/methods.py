# SPDX-License-Identifier: Apache-2.0
"""A method each that starts from saved states, that drafts from a hidden state, and
that adds layers with KV.
"""

from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "early": {"method": "ppd", "exit_layer": 5},
    "cp": {"method": "cp", "heads": ("cp", {"rank": 3, "condition": "none"})},
    "dynamo": {"method": "dynamo", "eps_b": 0.1, "heads": ("dynamo", {})},
}

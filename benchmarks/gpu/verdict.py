# SPDX-License-Identifier: Apache-2.0
"""The rule by which a kernel stays."""

from __future__ import annotations

from typing import Any

PAYS = 0.8


def verdict(row: dict[str, Any]) -> str:
    """Whether a kernel pays, by the rule of 80 %: "kept", "does not pay", or "not measured" without a GPU.

    Kept is what reaches 80 % of the floor and is not slower than torch, and what takes at most 80 % of torch's time
    where launches keep both far from the floor.
    """
    if "triton_us" not in row:
        return "not measured: the reference alone runs here"
    share, of_torch = row["triton_share_of_floor"], row["triton_us"] / row["reference_us"]
    kept = of_torch <= PAYS or (share >= PAYS and of_torch <= 1)
    return f"{'kept' if kept else 'does not pay'}: {share:.0%} of the floor, {of_torch:.0%} of torch's time"

# SPDX-License-Identifier: Apache-2.0
"""What attention backends ask of passes between steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable

logger = logging.getLogger("vllm.vllm_ppd")

# Backends whose metadata are made of device tensors alone, so that nothing waits and a CUDA graph can make them anew.
ON_DEVICE = {"FLASH_ATTN", "TRITON_ATTN"}
_warned: set[str] = set()


def on_device(names: Iterable[str]) -> bool:
    """Whether all of some backends make their metadata on the device; says once of the others what that costs."""
    others = sorted(set(names) - ON_DEVICE)
    for name in set(others) - _warned:
        _warned.add(name)
        logger.warning(
            "vllm-ppd: attention backend %s may copy sequence lengths to the host in every shallow pass, which then "
            "waits for the device and runs without a CUDA graph of its own; --attention-backend FLASH_ATTN or "
            "TRITON_ATTN does neither",
            name,
        )
    return not others

# SPDX-License-Identifier: Apache-2.0
"""What passes outside vLLM's own steps have to mind: KV connectors, and backends that make the host wait."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("vllm.vllm_ppd")

# Backends whose metadata are made of device tensors alone, so that nothing waits and a CUDA graph can make them anew.
ON_DEVICE = {"FLASH_ATTN", "TRITON_ATTN"}
_warned: set[str] = set()


@contextmanager
def unseen_by_connectors() -> Iterator[None]:
    """Layers that run between steps: what they write is of drafts, which no connector is to store."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    agent, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, None
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = agent


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

# SPDX-License-Identifier: Apache-2.0
"""KV connectors beside methods that run parts of the target by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unseen_by_connectors() -> Iterator[None]:
    """Layers that run between steps: what they write is of drafts, which no connector is to store."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    agent, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, None
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = agent

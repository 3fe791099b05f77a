# SPDX-License-Identifier: Apache-2.0
"""KV connectors beside methods that run parts of the target by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def works_by_layers(kv_transfer_config: Any) -> bool:
    """Whether a connector moves the KV of each layer as the layer runs, rather than that of blocks around a step."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    connector = KVConnectorFactory.get_connector_class(kv_transfer_config)
    extra = kv_transfer_config.kv_connector_extra_config or {}
    return connector.requires_piecewise_for_cudagraph(extra) or connector.__name__ == "MoRIIOConnector"


@contextmanager
def unseen_by_connectors() -> Iterator[None]:
    """Layers that run between steps: what they write is of drafts, which no connector is to store."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    agent, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, None
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = agent

# SPDX-License-Identifier: Apache-2.0
"""Constraints on passes outside of vLLM's own steps: KV connectors, and backends that make the host wait."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_ppd.vllm_plugins.engine.temporary import temporarily

logger = logging.getLogger("vllm.vllm_ppd")

_warned: set[str] = set()


@contextmanager
def unseen_by_connectors() -> Iterator[None]:
    """A context for layers that run between steps, which hides their KV of drafts from connectors."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    with temporarily(kv_transfer_state, _KV_CONNECTOR_AGENT=None):
        yield


def on_device(groups: Iterable[Any]) -> bool:
    """Whether all attention groups update their metadata on the device; logs once if one does not."""
    others = {group.backend.get_name() for group in groups if not group.supports_draft_decode_metadata_update}
    for name in sorted(others - _warned):
        _warned.add(name)
        logger.warning(
            "vllm-ppd: attention backend %s may copy sequence lengths to the host in every shallow pass, which then "
            "waits for the device and runs without a CUDA graph; avoid this with --attention-backend FLASH_ATTN or "
            "TRITON_ATTN",
            name,
        )
    return not others

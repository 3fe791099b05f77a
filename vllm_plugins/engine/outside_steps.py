# SPDX-License-Identifier: Apache-2.0
"""Passes outside of vLLM's own steps, of which KV connectors must not know."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_ppd.vllm_plugins.engine.temporary import temporarily


@contextmanager
def unseen_by_connectors() -> Iterator[None]:
    """A context for layers that run between steps, which hides their KV of drafts from
    connectors.
    """
    from vllm.distributed.kv_transfer import kv_transfer_state

    with temporarily(kv_transfer_state, _KV_CONNECTOR_AGENT=None):
        yield

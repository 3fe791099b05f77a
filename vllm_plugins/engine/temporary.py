# SPDX-License-Identifier: Apache-2.0
"""Attributes of vLLM's modules and objects that are ours for a moment."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def temporarily(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of a module or an object, its class's too, within a context."""
    attributes = vars(owner)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(before)


def unseen_by_connectors() -> AbstractContextManager[None]:
    """A context for layers that run outside of vLLM's steps, which hides their KV from
    connectors.
    """
    from vllm.distributed.kv_transfer import kv_transfer_state

    return temporarily(kv_transfer_state, _KV_CONNECTOR_AGENT=None)

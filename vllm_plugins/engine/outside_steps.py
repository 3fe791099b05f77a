# SPDX-License-Identifier: Apache-2.0
"""Constraints on passes outside of vLLM's own steps: KV connectors, and backends that
make the host wait.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.logger import init_logger

from vllm_ppd.vllm_plugins.engine.temporary import temporarily

logger = init_logger("vllm.vllm_ppd")


@contextmanager
def unseen_by_connectors() -> Iterator[None]:
    """A context for layers that run between steps, which hides their KV of drafts from
    connectors.
    """
    from vllm.distributed.kv_transfer import kv_transfer_state

    with temporarily(kv_transfer_state, _KV_CONNECTOR_AGENT=None):
        yield


def on_device(groups: Iterable[Any]) -> bool:
    """Whether all attention groups update their metadata on the device; logs once if
    one does not.
    """
    others = [
        group.backend.get_name()
        for group in groups
        if not updates_in_place(group.get_metadata_builder())
    ]
    if others:
        logger.warning_once(
            "vllm-ppd: attention backend %s may copy sequence lengths to the host in "
            "every shallow pass, which then waits for the device and runs without a "
            "CUDA graph; unless the model has chunked layers, avoid this with "
            "--attention-backend FLASH_ATTN or TRITON_ATTN",
            others[0],
        )
    return not others


def updates_in_place(builder: Any) -> bool:
    """Whether a builder can update a decode pass's metadata for the next pass, and the
    update is of its own metadata.

    A derived builder may build other metadata and inherit an update that does not know
    of them: that of chunked local attention builds lengths and blocks of chunks, and
    its base class updates nothing, as it counts on sequence lengths that change in
    place.
    """
    if not builder.supports_draft_decode_metadata_update:
        return False
    kinds = type(builder).__mro__
    builds = next(kind for kind in kinds if "build" in vars(kind))
    updates = next(
        kind for kind in kinds if "update_draft_decode_metadata" in vars(kind)
    )
    return issubclass(updates, builds)

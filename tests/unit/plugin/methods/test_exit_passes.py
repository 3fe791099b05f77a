# SPDX-License-Identifier: Apache-2.0
"""What exits take on a GPU: their norm as one kernel, and attention backends whose
metadata passes may update.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from vllm_ppd.model_patches import exit_norm
from vllm_ppd.vllm_plugins.methods.early.passes import on_device


def test_vllm_has_such_norms() -> None:
    for op in exit_norm._norms():
        assert "native" in op.impls
        with op.set_priority(["native"]):
            assert op.get_priority() == ["native"]


@pytest.mark.parametrize(
    "backend", [TritonAttentionBackend, FlashAttentionBackend, TritonMLABackend]
)
def test_inherited_updates_are_not_trusted(backend: Any) -> None:
    """Chunked local attention builds lengths and blocks of its own, which its base
    class leaves as they are.
    """

    def trusted(kind: type, updates: bool = True) -> bool:
        builder = object.__new__(kind)
        builder.supports_draft_decode_metadata_update = updates
        group = SimpleNamespace(
            backend=backend, get_metadata_builder=lambda: builder
        )
        return on_device([group])

    builder = backend.get_builder_cls()
    chunked = create_chunked_local_attention_backend(backend, 16)
    assert trusted(builder)
    assert not trusted(builder, updates=False)
    assert not trusted(chunked.get_builder_cls())
    assert trusted(
        type("Renamed", (builder,), {})
    )  # builds as its base class does

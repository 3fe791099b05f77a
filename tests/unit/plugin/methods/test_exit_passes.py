# SPDX-License-Identifier: Apache-2.0
"""What exits take on a GPU: their norm as one kernel, logits in chunks, attention
backends that make passes wait.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.model_patches import exit_norm
from vllm_ppd.vllm_plugins.engine.outside_steps import on_device
from vllm_ppd.vllm_plugins.engine.staging import batch_sizes
from vllm_ppd.vllm_plugins.methods.early import reader as exit_reader
from vllm_ppd.vllm_plugins.methods.early.reader import EarlyReader


def test_vllm_has_such_norms() -> None:
    for op in exit_norm._norms():
        assert "native" in op.impls
        with op.set_priority(["native"]):
            assert op.get_priority() == ["native"]


def test_exits_are_sampled_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No logits of more rows than fit are held at once; readings are those of all rows together."""
    vocabulary = 50
    rows = 7
    weight = torch.randn(vocabulary, 8)
    seen = []

    def logits(hidden: torch.Tensor, gather: bool) -> torch.Tensor:
        seen.append(len(hidden))
        return hidden @ weight.T

    adapter: Any = SimpleNamespace(norm=lambda hidden, residual: hidden)
    head: Any = SimpleNamespace(logits=logits, vocab_size=vocabulary)
    hidden = torch.randn(rows, 8)
    temperature = torch.tensor([0.0, 0.5, 1.0, 0.0, 2.0, 0.7, 0.0])
    readings = []
    for at_once in (1 << 25, 2 * vocabulary):
        monkeypatch.setattr(exit_reader, "LOGITS_AT_ONCE", at_once)
        readings.append(
            EarlyReader(adapter, head, None).sample(
                2, (hidden, None), Sampling(temperature)
            )
        )
    assert seen == [7, 2, 2, 2, 1]
    whole, parts = readings
    greedy = temperature == 0
    assert torch.equal(whole.token_ids[greedy], parts.token_ids[greedy])
    torch.testing.assert_close(whole.confidence, parts.confidence)


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
        group = SimpleNamespace(backend=backend, get_metadata_builder=lambda: builder)
        return on_device([group])

    builder = backend.get_builder_cls()
    chunked = create_chunked_local_attention_backend(backend, 16)
    assert trusted(builder)
    assert not trusted(builder, updates=False)
    assert not trusted(chunked.get_builder_cls())
    assert trusted(type("Renamed", (builder,), {}))  # builds as its base class does


@pytest.mark.parametrize("most", [1, 2, 3, 16, 100, 1024])
def test_buckets(most: int) -> None:
    """Every batch size has one that is not smaller, of the same power of two."""
    sizes = list(batch_sizes(most))
    assert (
        sizes[0] == most
        and sizes == sorted(set(sizes), reverse=True)
        and sizes[-1] == 1
    )
    for size in range(1, most + 1):
        assert any(size <= bucket < 2 * size or bucket == most for bucket in sizes)

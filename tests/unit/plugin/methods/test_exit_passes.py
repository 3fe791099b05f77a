# SPDX-License-Identifier: Apache-2.0
"""What exits take on a GPU: their norm as one kernel, logits in chunks, attention
backends that make passes wait.
"""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionMetadataBuilder,
)

from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.model_patches import exit_norm
from vllm_ppd.vllm_plugins.engine import outside_steps
from vllm_ppd.vllm_plugins.engine.outside_steps import on_device, updates_in_place
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
                2, (hidden, None), Sampling.random(temperature)
            )
        )
    assert seen == [7, 2, 2, 2, 1]
    whole, parts = readings
    greedy = temperature == 0
    assert torch.equal(whole.token_ids[greedy], parts.token_ids[greedy])
    torch.testing.assert_close(whole.confidence, parts.confidence)


def attention_group(name: str, updates: bool) -> Any:
    """As much of vLLM's AttentionGroup as is asked for."""
    backend = SimpleNamespace(get_name=lambda: name)
    builder = object.__new__(TritonAttentionMetadataBuilder)
    builder.supports_draft_decode_metadata_update = updates
    return SimpleNamespace(backend=backend, get_metadata_builder=lambda: builder)


def test_backends_that_wait_are_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outside_steps, "_warned", set())
    monkeypatch.setattr(outside_steps.logger, "propagate", True)
    updates = attention_group("FLASH_ATTN", True)
    waits = attention_group("FLASHINFER", False)
    with caplog.at_level(logging.WARNING):
        assert on_device([updates]) and not caplog.records
        assert not on_device([updates, waits])
        assert not on_device([waits])
    (record,) = caplog.records
    message = record.getMessage()
    assert (
        "FLASHINFER" in message
        and "FLASH_ATTN or TRITON_ATTN" in message
        and len(message) <= 300
    )


@pytest.mark.parametrize(
    "backend", [TritonAttentionBackend, FlashAttentionBackend, TritonMLABackend]
)
def test_inherited_updates_are_not_trusted(backend: Any) -> None:
    """Chunked local attention builds lengths and blocks of its own, which its base
    class leaves as they are.
    """

    def trusted(kind: Any) -> bool:
        builder = object.__new__(kind.get_builder_cls())
        builder.supports_draft_decode_metadata_update = True
        return updates_in_place(builder)

    assert trusted(backend)
    assert not trusted(create_chunked_local_attention_backend(backend, 16))
    # Builds as its base class does
    own = type("Renamed", (backend.get_builder_cls(),), {})
    assert trusted(SimpleNamespace(get_builder_cls=lambda: own))


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

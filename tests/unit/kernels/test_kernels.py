# SPDX-License-Identifier: Apache-2.0
"""Distributions against vLLM's, and copies in paged KV caches against vLLM's own writes."""

import pytest
import torch
from heads_folders import sampling_at
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from vllm_ppd.kernels.joint import truncated
from vllm_ppd.kernels.paged_copy import copy_blocks, copy_entries, entry_places


@pytest.mark.parametrize("with_k", [False, True])
@pytest.mark.parametrize("with_p", [False, True])
def test_limits_are_vllms(with_k: bool, with_p: bool) -> None:
    torch.manual_seed(3)
    logits = 3 * torch.randn(40, 97)
    temperature = 0.2 + 2 * torch.rand(40)
    top_k = torch.randint(1, 98, (40,)) if with_k else None
    top_p = 1 - torch.rand(40) if with_p else None
    if top_p is not None:
        top_p[:3] = torch.tensor([1.0, 1e-6, 0.5])
    heated = logits / temperature[:, None]
    probs = heated.softmax(-1)
    expected = apply_top_k_top_p_pytorch(heated, top_k, top_p).softmax(-1)
    sampling = sampling_at(temperature, top_k, top_p)
    actual = truncated(probs, sampling)
    torch.testing.assert_close(actual, expected)
    assert torch.equal(actual > 0, expected > 0)


HEADS = 2
SIZE = 32
HEAD_DIM = 64


def write_kv(
    cache: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """As vLLM's CPU attention writes keys and values [tokens, heads, head size]."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(cache.dtype, SIZE, HEAD_DIM)
    parts = cache.view(
        len(cache),
        HEADS,
        2 * SIZE,
        HEAD_DIM,
    ).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        key,
        value,
        *parts,
        slots,
        isa,
    )


def write_numbers(
    cache: torch.Tensor,
    slot: int,
    numbers: torch.Tensor,
) -> None:
    key, value = numbers.to(cache.dtype).view(
        2,
        1,
        HEADS,
        HEAD_DIM,
    )
    write_kv(
        cache,
        torch.tensor([slot]),
        key,
        value,
    )


# The last as on a processor with AMX, which keeps keys in an order of its own.
@pytest.mark.parametrize(
    ("dtype", "amx"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
)
def test_copies_are_what_vllm_would_have_written(
    dtype: torch.dtype, amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if amx and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this build of vLLM knows no order for AMX")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    torch.manual_seed(0)
    slots = torch.arange(3 * SIZE)
    key, value = torch.randn(
        2,
        3 * SIZE,
        HEADS,
        HEAD_DIM,
    ).to(dtype)
    layers = torch.zeros(
        3,
        3,
        HEADS,
        SIZE,
        2 * HEAD_DIM,
        dtype=dtype,
    )
    expected, *copied = layers
    for layer in copied:
        write_kv(
            layer,
            slots,
            key,
            value,
        )
    copy_blocks(copied, torch.tensor([2]), torch.tensor([0]))
    source = torch.tensor([5, SIZE])
    target = torch.tensor([2 * SIZE + 31, SIZE + 8])
    copy_entries(
        copied,
        source,
        target,
        entry_places(write_numbers, expected),
    )
    for tensor in (key, value):
        tensor[:SIZE] = tensor[2 * SIZE :]
        tensor[target] = tensor[source]
    write_kv(
        expected,
        slots,
        key,
        value,
    )
    assert all(torch.equal(layer, expected) for layer in copied)


def test_entries_that_share_numbers_are_refused() -> None:
    cache = torch.zeros(
        1,
        1,
        4,
        8,
    )
    with pytest.raises(ValueError, match="do not divide a block of 32 numbers"):
        entry_places(lambda cache, slot, numbers: cache.fill_(1), cache)

# SPDX-License-Identifier: Apache-2.0
"""The vocabulary-parallel top-k against a direct one; copies in paged KV caches against
vLLM's own writes.
"""

import pytest
import torch

from vllm_ppd.kernels.paged_copy import copy_blocks, copy_entries, entry_places
from vllm_ppd.kernels.topk import merge_topk, shard_topk


def sharded(
    logits: torch.Tensor, shards: int, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel as tensor-parallel ranks run it: equal padded shards, then the merge."""
    vocab = logits.shape[1]
    width = -(-vocab // shards)
    parts = []
    for rank in range(shards):
        start = rank * width
        stop = min((rank + 1) * width, vocab)
        # Padding holds what a real LM head's padding may hold: anything.
        padded = torch.full((logits.shape[0], width), 1e4)
        padded[:, : stop - start] = logits[:, start:stop]
        parts.append(shard_topk(padded, min(k, stop - start), start, stop - start))
    least = min(part.values.shape[1] for part in parts)
    assert least == min(k, vocab - (shards - 1) * width)
    values = torch.stack([part.values[:, :least] for part in parts], dim=1)
    ids = torch.stack([part.token_ids[:, :least] for part in parts], dim=1)
    return merge_topk(
        values, ids, torch.stack([part.logsumexp for part in parts], dim=1), least
    )


@pytest.mark.parametrize(
    ("vocab", "k"), [(4, 1), (257, 1), (1000, 1), (32_000, 1), (301, 5)]
)
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_top_k_is_the_whole_vocabulary_s(vocab: int, k: int, shards: int) -> None:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    ids, probs = sharded(logits, shards, k)
    expected = torch.softmax(logits, -1).topk(k)
    assert ids.tolist() == expected.indices.tolist()
    torch.testing.assert_close(probs, expected.values)


def test_ties_go_to_the_lowest_id_whatever_the_split() -> None:
    logits = torch.zeros(2, 12)
    logits[1, [3, 7, 11]] = 5.0
    for shards in (1, 2, 3):
        assert sharded(logits, shards, 1)[0][:, 0].tolist() == [0, 3]


def test_masked_and_bfloat16_logits() -> None:
    logits = torch.full((1, 8), float("-inf"))
    logits[0, 6] = 2.0
    ids, probs = sharded(logits, 2, 1)
    assert ids.item() == 6
    assert probs.item() == 1.0
    best = shard_topk(logits.bfloat16(), 1, 100, 8)
    assert best.token_ids.item() == 106
    assert best.values.dtype == torch.float32


@pytest.mark.parametrize("k", [0, 9])
def test_k_out_of_range(k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k} is outside 1..8"):
        shard_topk(torch.zeros(1, 10), k, 0, 8)


HEADS = 2
SIZE = 32
HEAD_DIM = 64


def write_kv(
    cache: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """As vLLM's CPU attention writes keys and values [tokens, heads, head size]."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(cache.dtype, SIZE, HEAD_DIM)
    parts = cache.view(len(cache), HEADS, 2 * SIZE, HEAD_DIM).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *parts, slots, isa)


# The last as on a processor with AMX, which keeps keys in an order of its own.
ORDERS = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]


@pytest.fixture
def cache_dtype(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> torch.dtype:
    """The type of a cache whose order is vLLM's for a processor with AMX, or one without it."""
    dtype, amx = request.param
    if amx and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this build of vLLM knows no order for AMX")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    return dtype


def three_full_blocks(
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Keys, values, and the caches of two layers that hold them."""
    generator = torch.Generator().manual_seed(0)
    key, value = (
        torch.randn(3 * SIZE, HEADS, HEAD_DIM, generator=generator).to(dtype)
        for _ in range(2)
    )
    layers = [torch.zeros(3, HEADS, SIZE, 2 * HEAD_DIM, dtype=dtype) for _ in range(2)]
    for layer in layers:
        write_kv(layer, torch.arange(3 * SIZE), key, value)
    return key, value, layers


@pytest.mark.parametrize("cache_dtype", ORDERS, indirect=True)
def test_copied_blocks_are_those_vllm_would_have_written(
    cache_dtype: torch.dtype,
) -> None:
    key, value, layers = three_full_blocks(cache_dtype)
    expected = torch.zeros_like(layers[0])
    for tensor in (key, value):
        tensor[:SIZE] = tensor[2 * SIZE :]
    write_kv(expected, torch.arange(3 * SIZE), key, value)
    copy_blocks(layers, torch.tensor([2]), torch.tensor([0]))
    assert all(torch.equal(layer, expected) for layer in layers)


@pytest.mark.parametrize("cache_dtype", ORDERS, indirect=True)
def test_copied_entries_are_those_vllm_would_have_written(
    cache_dtype: torch.dtype,
) -> None:
    key, value, layers = three_full_blocks(cache_dtype)
    expected = torch.zeros_like(layers[0])
    source = torch.tensor([5, SIZE])
    target = torch.tensor([2 * SIZE + 31, SIZE + 8])
    for tensor in (key, value):
        tensor[target] = tensor[source]
    write_kv(expected, torch.arange(3 * SIZE), key, value)

    copy_entries(layers, source, target, entry_places(write_numbers, layers[0]))
    assert all(torch.equal(layer, expected) for layer in layers)


def write_numbers(cache: torch.Tensor, slot: int, numbers: torch.Tensor) -> None:
    write_kv(
        cache,
        torch.tensor([slot]),
        *numbers.to(cache.dtype).view(2, 1, HEADS, HEAD_DIM),
    )


def test_entries_that_share_numbers_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"do not divide a block of 32 numbers; copy whole blocks instead",
    ):
        entry_places(
            lambda cache, slot, numbers: cache.fill_(1), torch.zeros(1, 1, 4, 8)
        )

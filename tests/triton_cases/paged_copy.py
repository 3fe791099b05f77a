# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks inside paged KV caches: Triton against torch, in every layout that vLLM lays caches out in."""

import pytest
import torch

from vllm_ppd.kernels import paged_copy, paged_copy_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS, HEADS, SIZE, CONTENT, LAYERS = 7, 3, 16, 2 * 24, 4
# Physical order of [layer, block, head, offset, content], as vLLM's KVCacheLayout names them.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),  # a block is not one run of memory here and in the next
    "BHLNC": (1, 2, 0, 3, 4),
}


def caches(layout: str, dtype: torch.dtype, content: int = CONTENT) -> list[torch.Tensor]:
    """Layers' views into one storage."""
    sizes = (LAYERS, BLOCKS, HEADS, SIZE, content)
    order = LAYOUTS[layout]
    storage = torch.randn([sizes[axis] for axis in order], generator=torch.Generator().manual_seed(0))
    placed = storage.to(device=DEVICE, dtype=dtype)
    return list(placed.permute(*(order.index(axis) for axis in range(5))).unbind(0))


def pairs(*blocks: tuple[int, int]) -> list[torch.Tensor]:
    """Sources and targets."""
    return [torch.tensor(part, device=DEVICE) for part in zip(*blocks, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_blocks(layout: str, dtype: torch.dtype) -> None:
    actual, expected = caches(layout, dtype), caches(layout, dtype)
    before = [layer.clone() for layer in expected]
    for kernels, layers in ((paged_copy_triton, actual), (paged_copy, expected)):
        kernels.copy_blocks(layers, *pairs((2, 1), (2, 5), (-1, 0), (3, -1)))
    for layer, reference, old in zip(actual, expected, before, strict=True):
        assert torch.equal(layer, reference)
        assert torch.equal(layer[[1, 5]], old[[2, 2]])
        assert torch.equal(layer[[0, 2, 3, 4, 6]], old[[0, 2, 3, 4, 6]])


@pytest.mark.parametrize("content", [1, 23, 1100])
def test_contents_that_no_wide_number_divides(content: int) -> None:
    """One byte, an odd run of bytes, and more numbers than a program moves."""
    actual, expected = (caches("LBNHC", torch.uint8, content) for _ in range(2))
    paged_copy_triton.copy_blocks(actual, *pairs((4, 0), (4, 6)))
    paged_copy.copy_blocks(expected, *pairs((4, 0), (4, 6)))
    assert all(torch.equal(layer, reference) for layer, reference in zip(actual, expected, strict=True))


def test_blocks_that_a_backend_has_divided() -> None:
    """The scheduler's block is two of the backend's."""
    divided = [layer.unflatten(0, (3, 2)) for layer in (cache[:6] for cache in caches("LBHNC", torch.bfloat16))]
    expected = [layer[2].clone() for layer in divided]
    paged_copy_triton.copy_blocks(divided, *pairs((2, 0)))
    assert all(torch.equal(layer[0], block) for layer, block in zip(divided, expected, strict=True))


def test_nan_arrives_bit_for_bit() -> None:
    layers = caches("BLHNC", torch.float32)
    layers[1][2] = torch.tensor(0x7FC00123, dtype=torch.int32).view(torch.float32).to(DEVICE)
    paged_copy_triton.copy_blocks(layers, *pairs((2, 6)))
    assert (layers[1][6].contiguous().view(torch.int32) == 0x7FC00123).all()


def test_layers_of_other_shapes() -> None:
    layers = [*caches("LBHNC", torch.float32), *caches("LBHNC", torch.float32, content=8)]
    paged_copy_triton.copy_blocks(layers, *pairs((1, 2)))
    assert all(torch.equal(layer[2], layer[1]) for layer in layers)


def test_nothing_to_copy() -> None:
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    layers = caches("LBHNC", torch.float32)
    paged_copy_triton.copy_blocks(layers, none, none)
    paged_copy_triton.copy_blocks([], none, none)
    assert all(torch.equal(a, b) for a, b in zip(layers, caches("LBHNC", torch.float32), strict=True))

# SPDX-License-Identifier: Apache-2.0
"""Copies inside paged KV caches: Triton against torch, in every layout that vLLM lays caches out in."""

from __future__ import annotations

import pytest
import torch

from vllm_ppd.kernels import paged_copy, paged_copy_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS, HEADS, SIZE, CONTENT, LAYERS = 7, 3, 16, 2 * 24, 4
# Physical order of [layer, block, head, offset, content], as vLLM's KVCacheLayout names them.
LAYOUTS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "BLHNC": (1, 0, 2, 3, 4), "BLNHC": (1, 0, 3, 2, 4)}


def caches(layout: str, dtype: torch.dtype, content: int = CONTENT) -> list[torch.Tensor]:
    """Layers' views into one storage."""
    sizes = (LAYERS, BLOCKS, HEADS, SIZE, content)
    order = LAYOUTS[layout]
    storage = torch.randn([sizes[axis] for axis in order], generator=torch.Generator().manual_seed(0))
    placed = storage.to(device=DEVICE, dtype=dtype)
    return list(placed.permute(*(order.index(axis) for axis in range(5))).unbind(0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_slots_and_blocks(layout: str, dtype: torch.dtype) -> None:
    found, expected = caches(layout, dtype), caches(layout, dtype)
    before = [layer.clone() for layer in expected]
    source = torch.tensor([5, 2 * SIZE + 15, -1, 3, 5], device=DEVICE)
    target = torch.tensor([6 * SIZE, 3 * SIZE + 2, 4, -1, 4 * SIZE + 5], device=DEVICE)
    for kernels, layers in ((paged_copy_triton, found), (paged_copy, expected)):
        kernels.copy_slots(layers, source, target)
        kernels.copy_blocks(layers, torch.tensor([2, 2, -1], device=DEVICE), torch.tensor([1, 5, 0], device=DEVICE))
    for layer, reference, old in zip(found, expected, before, strict=True):
        assert torch.equal(layer, reference)
        assert torch.equal(layer[6, :, 0], old[0, :, 5])
        assert torch.equal(layer[4, :, 5], old[0, :, 5])
        assert torch.equal(layer[0], old[0])


def test_content_longer_than_a_program() -> None:
    found, expected = (caches("LBNHC", torch.bfloat16, content=1100) for _ in range(2))
    pair = torch.tensor([1], device=DEVICE), torch.tensor([SIZE], device=DEVICE)
    paged_copy_triton.copy_slots(found, *pair)
    paged_copy.copy_slots(expected, *pair)
    assert all(torch.equal(layer, reference) for layer, reference in zip(found, expected, strict=True))


def test_layers_of_other_shapes() -> None:
    layers = [*caches("LBHNC", torch.float32), *caches("LBHNC", torch.float32, content=8)]
    expected = [layer[0, :, 3].clone() for layer in layers]
    paged_copy_triton.copy_slots(layers, torch.tensor([3], device=DEVICE), torch.tensor([SIZE + 4], device=DEVICE))
    assert all(torch.equal(layer[1, :, 4], entry) for layer, entry in zip(layers, expected, strict=True))
    paged_copy_triton.copy_blocks(layers, torch.tensor([1], device=DEVICE), torch.tensor([2], device=DEVICE))
    assert all(torch.equal(layer[2], layer[1]) for layer in layers)


def test_nothing_to_copy() -> None:
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    layers = caches("LBHNC", torch.float32)
    paged_copy_triton.copy_slots(layers, none, none)
    paged_copy_triton.copy_slots([], none, none)
    paged_copy_triton.copy_blocks(layers, none, none)
    assert all(torch.equal(a, b) for a, b in zip(layers, caches("LBHNC", torch.float32), strict=True))

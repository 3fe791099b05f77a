# SPDX-License-Identifier: Apache-2.0
"""Thresholds of DynaMo's joint: Triton against torch."""

from __future__ import annotations

import pytest
import torch

from vllm_ppd.kernels import joint_threshold as reference
from vllm_ppd.kernels.joint_threshold_triton import adaptive_threshold

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def joint(rows: int, sizes: list[int], seed: int = 0) -> torch.Tensor:
    """A joint of heads' probabilities in descending order, as a model's: few large, many small."""
    generator = torch.Generator().manual_seed(seed)
    heads = [(3 * torch.randn(rows, k, generator=generator)).softmax(-1).sort(descending=True).values for k in sizes]
    mask = torch.rand(rows, *sizes, generator=generator)
    return reference.apply_mask(reference.joints([head.log() for head in heads])[-1], mask, 1.0).to(DEVICE)


def same(actual: torch.Tensor, values: torch.Tensor, floor: torch.Tensor, blur: int) -> None:
    """Equal, but for entries that rounding may put on either side of their row's threshold."""
    expected = reference.adaptive_threshold(values, floor, blur)
    shape = (-1, *[1] * (values.dim() - 1))
    blurred = reference.gaussian_blur(torch.where(values >= floor.view(shape), values, 0.0), blur)
    threshold = reference.otsu_threshold(blurred.flatten(1)).view(shape)
    close = (blurred - threshold).abs() <= 2e-6 * threshold
    assert torch.equal(torch.where(close, 0.0, actual), torch.where(close, 0.0, expected))
    assert torch.where(close, (actual == 0) | (actual == values), actual == expected).all()


@pytest.mark.parametrize("blur", [1, 3])
@pytest.mark.parametrize("sizes", [[1, 50, 50], [50], [7, 1, 5], [20, 9, 13], [1, 1], [3, 2, 700]])
def test_thresholds(sizes: list[int], blur: int) -> None:
    values = joint(3, sizes)
    floor = torch.tensor([0.0, 1e-4, 0.3], device=DEVICE)
    same(adaptive_threshold(values, floor, blur), values, floor, blur)


def test_peaks_ties_and_empty_rows() -> None:
    values = joint(5, [6, 40])
    values[0] = 0.25  # constant: all stay
    values[1] = 0  # nothing left
    values[2] = 0
    values[2, 3, 20] = 1.0  # a lone peak survives its own blur
    values[3, :, 1::2] = values[3, :, ::2]
    floor = torch.tensor([0.0, 0.0, 0.5, 0.0, 2.0], device=DEVICE)
    actual = adaptive_threshold(values, floor)
    same(actual, values, floor, 3)
    assert (actual[0] == 0.25).all()
    assert actual[2, 3, 20] == 1
    assert not actual[[1, 4]].any()


def test_nan_is_under_every_floor() -> None:
    values = joint(2, [5, 30])
    values[0] = float("nan")
    values[1, 2, 3] = float("nan")
    floor = torch.zeros(2, device=DEVICE)
    actual, expected = adaptive_threshold(values, floor), reference.adaptive_threshold(values, floor)
    assert torch.equal(actual, expected)
    assert not actual.isnan().any()


def test_what_the_reference_takes_over() -> None:
    values = joint(2, [3, 3, 3, 3])
    floor = torch.tensor([0.0, 0.01], device=DEVICE)
    assert torch.equal(adaptive_threshold(values, floor), reference.adaptive_threshold(values, floor))
    assert torch.equal(adaptive_threshold(values, floor, 5), reference.adaptive_threshold(values, floor, 5))
    floored = torch.where(values >= floor.view(2, 1, 1, 1, 1), values, 0)
    assert torch.equal(adaptive_threshold(values, floor, 3, False), floored)
    with pytest.raises(ValueError, match="kernel size 2 is not a positive odd number"):
        adaptive_threshold(values, floor, 2)

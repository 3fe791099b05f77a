# SPDX-License-Identifier: Apache-2.0
"""DynaMo's joint over the top-k of n token heads: mask, static and Otsu threshold, repetition penalty, back-off.

A joint is [rows, k, ..., k] with one axis a token, each in descending order of its head's probability. Section and
equation numbers are DynaMo's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

BINS = 256


def joints(scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The products of the heads' probabilities (eq. 2), each renormalised over its top-k as in top-k sampling.

    Args:
        scores: [rows, k_i] of each head, log-probabilities up to a constant a row; the sizes may differ.

    Returns:
        Of the first head alone, the first two, and so on to all n: [rows, k_1, ..., k_m], of sum 1 a row.
    """
    result: list[torch.Tensor] = []
    for head in scores:
        share = torch.softmax(head.float(), dim=-1)
        if result:
            share = result[-1].unsqueeze(-1) * _on_axis(share, len(result), len(result) + 1)
        result.append(share)
    return result


def apply_mask(joint: torch.Tensor, mask: torch.Tensor, alpha_c: float) -> torch.Tensor:
    """joint * mask^alpha_c (eq. 3 and 6), renormalised to sum 1 a row.

    The mask is a ratio of probabilities and may exceed 1: without renormalisation the joint would, too, and eps_b
    would mean nothing. A row whose every entry is masked becomes all zero; alpha_c = 0 leaves the joint as it was.
    """
    if alpha_c == 0:
        return joint
    mask = mask.float()
    masked = joint * (mask if alpha_c == 1 else mask**alpha_c)
    total = masked.flatten(1).sum(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    return masked / total.view(-1, *[1] * (joint.dim() - 1))


def gaussian_blur(joint: torch.Tensor, kernel_size: int = 3) -> torch.Tensor:
    """A separable Gaussian over every token axis, edges replicated; size 1 changes nothing.

    Raises:
        ValueError: if the kernel size is not a positive odd number.
    """
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel size {kernel_size} is not a positive odd number; 1 is no blur, 3 the paper's")
    if kernel_size == 1:
        return joint
    half = kernel_size // 2
    sigma = 0.3 * (half - 1) + 0.8  # what image libraries take for a kernel of this size
    weights = [math.exp(-(offset**2) / (2 * sigma**2)) for offset in range(half + 1)]
    total = 2 * sum(weights) - weights[0]
    for axis in range(1, joint.dim()):
        size = joint.shape[axis]
        if size == 1:  # replicated edges are all it would be averaged with
            continue
        moved = joint.movedim(axis, -1)
        lines = functional.pad(moved.reshape(len(joint), -1, size), (half, half), mode="replicate")
        blurred = weights[0] / total * lines[..., half : half + size]
        for offset, weight in enumerate(weights[1:], start=1):
            left, right = half - offset, half + offset
            both = lines[..., left : left + size] + lines[..., right : right + size]
            blurred = blurred.add(both, alpha=weight / total)
        joint = blurred.reshape(moved.shape).movedim(-1, axis)
    return joint


def otsu_threshold(values: torch.Tensor, bins: int = BINS) -> torch.Tensor:
    """Otsu's threshold of each row: the histogram cut of greatest between-class variance.

    Args:
        values: [rows, entries], not negative.
        bins: of the histogram, from a row's least to its greatest value.

    Returns:
        [rows]: values from there on are the upper class. A constant row keeps every entry.
    """
    least, greatest = torch.aminmax(values, dim=1, keepdim=True)
    width = (greatest - least).clamp(min=torch.finfo(torch.float32).tiny)
    index = ((values - least) / width * bins).long().clamp(0, bins - 1)
    counts = torch.zeros(len(values), bins, dtype=torch.float64, device=values.device)
    counts.scatter_add_(1, index, torch.ones_like(index, dtype=torch.float64))
    centres = torch.arange(bins, device=values.device, dtype=torch.float64) + 0.5
    below = counts.cumsum(1)[:, :-1]  # entries under cut i, which lies before bin i + 1
    mass = (counts * centres).cumsum(1)
    total = values.shape[1]
    # The classes' means differ by pull / (below * above), and the variance is below * above * difference^2.
    pull = mass[:, :-1] * total - mass[:, -1:] * below
    variance = pull.square() / (below * (total - below)).clamp(min=1)
    cut = variance.argmax(dim=1, keepdim=True) + 1
    threshold = least + width * cut / bins
    return torch.where(greatest > least, threshold, least).squeeze(1).float()


def adaptive_threshold(
    joint: torch.Tensor,
    floor: torch.Tensor,  # [rows] static threshold, eps_b^(n-1)
    blur: int = 3,
    adaptive: bool = True,
) -> torch.Tensor:
    """Set entries under the static floor to 0, then those under Otsu's threshold (section 3.2.2).

    Otsu's threshold is found on the blurred joint and compared with it, as image pipelines do; what survives keeps its
    raw probability. A row's peak survives if it passed the floor.
    """
    shape = (-1, *[1] * (joint.dim() - 1))
    kept = torch.where(joint >= floor.view(shape), joint, 0.0)
    if not adaptive:
        return kept
    blurred = gaussian_blur(kept, blur)
    threshold = otsu_threshold(blurred.flatten(1))
    peak = kept.flatten(1).amax(dim=1)
    return torch.where((blurred >= threshold.view(shape)) | (kept >= peak.view(shape)), kept, 0.0)


def penalise_repetition(
    joint: torch.Tensor,
    token_ids: Sequence[torch.Tensor],  # [rows, k_i] of each head
    penalty: float,
    seen: Sequence[torch.Tensor] | None = None,  # [rows, k_i] bool of each head: tokens of the context
) -> torch.Tensor:
    """Divide an entry by the penalty, once, if one of its tokens is in the context or repeats an earlier one of it."""
    if penalty == 1:
        return joint
    repeats = torch.zeros(joint.shape, dtype=torch.bool, device=joint.device)
    axes = [_on_axis(ids, i, len(token_ids)) for i, ids in enumerate(token_ids)]
    for i, ids in enumerate(axes):
        if seen is not None:
            repeats = repeats | _on_axis(seen[i], i, len(token_ids))
        for earlier in axes[:i]:
            repeats = repeats | (ids == earlier)
    return torch.where(repeats, joint / penalty, joint)


def _on_axis(values: torch.Tensor, axis: int, axes: int) -> torch.Tensor:
    """[rows, k] as [rows, 1, .., k, .., 1] with k on a token axis."""
    return values.view(len(values), *(values.shape[1] if i == axis else 1 for i in range(axes)))

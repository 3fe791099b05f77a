# SPDX-License-Identifier: Apache-2.0
"""DynaMo's joint: static and Otsu's thresholds, repetition penalty, and draws of n-grams from what is left."""

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from vllm_ppd.kernels.draws import draw_as
from vllm_ppd.kernels.joint import TINY, Likeliest, Top
from vllm_ppd.kernels.sampling import INVALID, Sampling, is_greedy, truncated

BINS = 256


def gaussian_blur(joint: torch.Tensor, kernel_size: int = 3) -> torch.Tensor:
    """Blur every token axis with a separable Gaussian, edges replicated; size 1 changes nothing.

    Raises:
        ValueError: if the kernel size is not a positive odd number.
    """
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel size {kernel_size} is not a positive odd number; 1 is no blur, 3 the paper's")
    if kernel_size == 1:
        return joint
    half = kernel_size // 2
    sigma = 0.3 * (half - 1) + 0.8  # image libraries' value for a kernel of this size
    weights = [math.exp(-(offset**2) / (2 * sigma**2)) for offset in range(half + 1)]
    total = 2 * sum(weights) - weights[0]
    for axis in range(1, joint.dim()):
        size = joint.shape[axis]
        if size == 1:  # it would be averaged with copies of itself
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
        bins: number of bins from a row's least to its greatest value.

    Returns:
        [rows]: values of at least the threshold are the upper class. A constant row keeps every entry.
    """
    least, greatest = torch.aminmax(values, dim=1, keepdim=True)
    width = (greatest - least).clamp(min=TINY)
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
    """Set entries under the static floor to 0, then those under Otsu's threshold (DynaMo, section 3.2.2).

    Otsu's threshold is computed from the blurred joint and compared with it, as in image pipelines; entries that
    survive keep their raw probability. A row's peak survives if it passed the floor.
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
    """Divide an entry by the penalty, once, if one of its tokens is in the context or repeats an earlier token."""
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
    """View [rows, k] as [rows, 1, .., k, .., 1] with k on a token axis."""
    return values.view(len(values), *(values.shape[1] if i == axis else 1 for i in range(axes)))


def cut(joints: Sequence[torch.Tensor], likeliest: Likeliest, blur: int, adaptive: bool) -> list[torch.Tensor]:
    """Divide the joint of each order by its sum and apply the thresholds; valid only in rows of that order."""
    totals, result = likeliest.total.clamp(min=TINY), []
    for order, joint in enumerate(joints, start=1):
        share = joint / totals.view(-1, *[1] * order)
        result.append(share if order == 1 else adaptive_threshold(share, likeliest.floor, blur, adaptive))
    return result


def conditional(joints: Sequence[torch.Tensor], order: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The distribution [rows, k] of the token after those with indices `before` [rows, tokens]; zero past the order."""
    rows, position = torch.arange(len(order), device=order.device), before.shape[1]
    result = torch.zeros(len(order), joints[position].shape[-1], device=order.device)
    for m, joint in enumerate(joints[position:], start=position + 1):
        weights = joint[(rows, *before.unbind(1))]
        weights = weights.flatten(2).sum(dim=2) if weights.dim() > 2 else weights
        share = weights / weights.sum(dim=1, keepdim=True).clamp(min=TINY)
        result = torch.where((order == m)[:, None], share, result)
    return result


def draw_ngrams(
    joints: Sequence[torch.Tensor],  # of each order from 1, [rows, k_1, ..., k_m] float32
    likeliest: Likeliest,
    top: Top,
    blur: int,
    adaptive: bool,
    sampling: Sampling,  # with the positions for the first draft
) -> torch.Tensor:
    """Draw an n-gram of each row's order in proportion to the joint after the thresholds.

    Rows at temperature 0 take the likeliest n-gram. Each token's distribution given the tokens before it is cut to the
    row's top-k and top-p; the joint already includes the rows' temperatures.

    Returns:
        [rows, n] int64 tokens, -1 past the order and where a draft's distribution is invalid.
    """
    joints, greedy = cut(joints, likeliest, blur, adaptive), is_greedy(sampling.temperature)
    places, tokens = likeliest.places.clone(), likeliest.tokens.clone()
    for position, ids in enumerate(top.token_ids):
        distribution = torch.ones_like(ids, dtype=torch.float32)
        if ids.shape[1] > 1:  # else the token is already emitted: nothing to draw
            distribution = truncated(conditional(joints, likeliest.order, places[:, :position]), sampling)
            drawn = draw_as(distribution, sampling.ahead(position - (top.first_token is not None)), ids)
            places[:, position] = torch.where(greedy, places[:, position], drawn)
        tokens[:, position] = ids.gather(1, places[:, position : position + 1])[:, 0]
        if position:
            valid = (likeliest.order > position) & (distribution.sum(dim=-1) > 0)
            tokens[:, position].masked_fill_(~valid, INVALID)
    return tokens

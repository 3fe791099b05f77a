# SPDX-License-Identifier: Apache-2.0
"""DynaMo's joint over the top-k of n token heads: mask, likeliest n-gram per order,
back-off, thresholds, draws.

A joint is [rows, k, ..., k] with an axis per token, each in descending order of its
head's probability; the axis of a first token that is already emitted has one entry.
Section and equation numbers are DynaMo's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from vllm_ppd.kernels.sampling import INVALID, Sampling, draw_as, is_greedy, truncated

TINY = torch.finfo(torch.float32).tiny


class Ngrams(NamedTuple):
    """Counted n-grams of orders 2 to n; the entries of each order end with a sentinel
    that no n-gram has.
    """

    # [entries] int64, x_1 B^(n-1) + ... + x_n of the tokens' digits, ascending within
    # an order
    keys: torch.Tensor
    ratios: torch.Tensor  # [entries] float32, p^(x_1..x_n) / prod p^(x_i) (eq. 3)
    # [n] int64, where the entries of each order begin, and where the last ones end
    starts: torch.Tensor
    bounds: tuple[int, ...]  # starts, on the host
    base: int  # B
    vocab_size: int
    # [vocabulary] int64, the digit of each token; None: its id
    columns: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> Ngrams:
        columns = None if self.columns is None else self.columns.to(device)
        return self._replace(
            keys=self.keys.to(device),
            ratios=self.ratios.to(device),
            starts=self.starts.to(device),
            columns=columns,
        )

    def digits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The digit of each token."""
        return (
            token_ids
            if self.columns is None
            else self.columns[token_ids.clamp(0, self.vocab_size - 1)]
        )


class Top(NamedTuple):
    """The heads' candidates."""

    # [heads, rows, k] float32 log-probabilities up to a constant per row, in descending
    # order
    scores: torch.Tensor
    ids: torch.Tensor  # [heads, rows, k] int64
    # [rows] int64, precedes the heads' tokens with probability 1
    first_token: torch.Tensor | None = None

    @property
    def token_ids(self) -> list[torch.Tensor]:
        """The candidates [rows, k_i] for each of the n tokens."""
        return [
            *([] if self.first_token is None else [self.first_token[:, None]]),
            *self.ids,
        ]


class Peaks(NamedTuple):
    """The likeliest n-gram in each part of every order's joint, from order 1, before
    division by the joint's sum.
    """

    sums: torch.Tensor  # [n, rows, parts] float32
    entries: torch.Tensor  # [n, rows, parts] float32
    places: torch.Tensor  # [n, rows, parts] int64 in the flattened joint


class Likeliest(NamedTuple):
    """The order that Algorithm 1 takes for each row, and its likeliest n-gram."""

    # [rows] int64, number of tokens, 1..n; 1 where a joint is not finite
    order: torch.Tensor
    # [rows] int64, tokens after the first; 1, which is INVALID, where a joint is not
    # finite
    drafts: torch.Tensor
    tokens: torch.Tensor  # [rows, n] int64, -1 past the order
    # [rows, n] int64, indices into each head's top-k, 0 past the order
    places: torch.Tensor
    floor: torch.Tensor  # [rows] float32, eps_b^(order - 1), 0 for order 1
    total: torch.Tensor  # [rows] float32, sum of the joint


def mask(ids: Sequence[torch.Tensor], ngrams: Ngrams) -> torch.Tensor:
    """Ratios (eq. 3) of combinations of n heads' tokens [rows, k_i], 0 if not counted:
    [rows, k_1, ..., k_n] float32.

    Raises:
        ValueError: if n-grams of that order were not counted.
    """
    order = len(ids)
    if not 2 <= order <= len(ngrams.bounds):
        raise ValueError(
            f"n-grams of order {order} were not counted; the highest order is "
            f"{len(ngrams.bounds)}"
        )
    wanted = ngrams.digits(ids[0])
    for axis, of_head in enumerate(ids[1:], start=1):
        digits = ngrams.digits(of_head).view(len(of_head), *[1] * axis, -1)
        wanted = torch.add(digits, wanted.unsqueeze(-1), alpha=ngrams.base)
    entries = slice(*ngrams.bounds[order - 2 : order])
    keys = ngrams.keys[entries]
    ratios = ngrams.ratios[entries]
    place = torch.searchsorted(keys, wanted)
    return ratios[place] * (keys[place] == wanted)


def find_peaks(
    top: Top, ngrams: Ngrams | None, alpha_c: float, with_joints: bool = True
) -> tuple[Peaks, list[torch.Tensor]]:
    """Build each order's joint: the product of heads' probabilities in their top-k (eq.
    2), times mask^alpha_c (eq. 6).

    The mask is a ratio of probabilities and may exceed 1. Without division by its sum,
    the joint might, too, and eps_b would mean nothing.

    Args:
        top: the candidates for n tokens.
        ngrams: n-grams of every order; None: the joint is the plain product.
        alpha_c: exponent of the mask.
        with_joints: whether to return the joints themselves.

    Returns:
        (peaks, joints [rows, k_1, ..., k_m] float32, not divided by their sums).
    """
    joints: list[torch.Tensor] = []
    product = top.scores.new_ones(top.ids.shape[1])
    first = [] if top.first_token is None else [top.scores.new_zeros(len(product), 1)]
    for order, head in enumerate([*first, *top.scores], start=1):
        product = product.unsqueeze(-1) * torch.softmax(head, dim=-1).view(
            len(head), *[1] * (order - 1), -1
        )
        ratios = (
            mask(top.token_ids[:order], ngrams)
            if ngrams is not None and order > 1
            else None
        )
        joints.append(
            product
            if ratios is None
            else product * (ratios if alpha_c == 1 else ratios**alpha_c)
        )
    return peaks_of(joints), joints


def peaks_of(joints: list[torch.Tensor]) -> Peaks:
    """The peaks of joints that are not split into parts."""
    best = [joint.flatten(1).max(dim=1, keepdim=True) for joint in joints]
    values, places = (torch.stack(parts) for parts in zip(*best, strict=True))
    return Peaks(
        torch.stack([joint.flatten(1).sum(dim=1, keepdim=True) for joint in joints]),
        values,
        places,
    )


def back_off(peaks: Peaks, top: Top, eps_b: torch.Tensor, default: float) -> Likeliest:
    """Take the highest order n whose likeliest n-gram has a share above eps_b^(n-1),
    else one token (Algorithm 1).

    The comparison is strict, so eps_b = 1 always backs off and eps_b = 0 never does
    while an entry is above 0.

    Args:
        peaks: the peaks of n orders.
        top: the candidates for n tokens.
        eps_b: [rows] float32 thresholds, NaN for the default.
        default: the default threshold.
    """
    totals = peaks.sums.sum(dim=-1)
    rows = top.ids.shape[1]
    best = peaks.entries.max(dim=-1, keepdim=True)
    values = best.values.squeeze(-1) / totals.clamp(min=TINY)
    finite = totals.isfinite().all(dim=0)
    eps = torch.where(eps_b.isnan(), default, eps_b)
    order = torch.ones_like(eps, dtype=torch.int64)
    floor = torch.zeros_like(eps)
    for m in range(2, len(totals) + 1):
        # This goes upwards and Algorithm 1 downwards; the highest order that passes
        # wins in both.
        taken = finite & (values[m - 1] > eps ** (m - 1))
        order = torch.where(taken, m, order)
        floor = torch.where(taken, eps ** (m - 1), floor)
    place, total = (
        of[order - 1, torch.arange(rows)]
        for of in (peaks.places.gather(-1, best.indices)[..., 0], totals)
    )
    places, tokens = torch.zeros(
        2, rows, len(totals), dtype=torch.int64, device=eps.device
    )
    for i, ids in reversed([*enumerate(top.token_ids)]):
        taken = i < order
        places[:, i] = torch.where(taken, place % ids.shape[1], 0)
        place = torch.where(taken, place // ids.shape[1], place)
        tokens[:, i] = torch.where(taken, ids.gather(1, places[:, i : i + 1])[:, 0], -1)
    return Likeliest(
        order, torch.where(finite, order - 1, 1), tokens, places, floor, total
    )


BINS = 256


def gaussian_blur(joint: torch.Tensor, kernel_size: int = 3) -> torch.Tensor:
    """Blur every token axis with a separable Gaussian, edges replicated; size 1 changes
    nothing.

    Raises:
        ValueError: if the kernel size is not a positive odd number.
    """
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(
            f"kernel size {kernel_size} is not a positive odd number; 1 is no blur, 3 "
            "the paper's"
        )
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
        lines = functional.pad(
            moved.reshape(len(joint), -1, size), (half, half), mode="replicate"
        )
        blurred = weights[0] / total * lines[..., half : half + size]
        for offset, weight in enumerate(weights[1:], start=1):
            left = half - offset
            right = half + offset
            both = lines[..., left : left + size] + lines[..., right : right + size]
            blurred = blurred.add(both, alpha=weight / total)
        joint = blurred.reshape(moved.shape).movedim(-1, axis)
    return joint


def otsu_threshold(values: torch.Tensor, bins: int = BINS) -> torch.Tensor:
    """Otsu's threshold of each row: the histogram cut of greatest between-class
    variance.

    Args:
        values: [rows, entries], not negative.
        bins: number of bins from a row's least to its greatest value.

    Returns:
        [rows]: values of at least the threshold are the upper class. A constant row
        keeps every entry.
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
    # The classes' means differ by pull / (below * above), and the variance is below *
    # above * difference^2.
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
    """Set entries under the static floor to 0, then those under Otsu's threshold
    (DynaMo, section 3.2.2).

    Otsu's threshold is computed from the blurred joint and compared with it, as in
    image pipelines; entries that survive keep their raw probability. A row's peak
    survives if it passed the floor.
    """
    shape = (-1, *[1] * (joint.dim() - 1))
    kept = torch.where(joint >= floor.view(shape), joint, 0.0)
    if not adaptive:
        return kept
    blurred = gaussian_blur(kept, blur)
    threshold = otsu_threshold(blurred.flatten(1))
    peak = kept.flatten(1).amax(dim=1)
    return torch.where(
        (blurred >= threshold.view(shape)) | (kept >= peak.view(shape)), kept, 0.0
    )


def penalise_repetition(
    joint: torch.Tensor,
    token_ids: Sequence[torch.Tensor],  # [rows, k_i] of each head
    penalty: float,
    seen: Sequence[torch.Tensor]
    | None = None,  # [rows, k_i] bool of each head: tokens of the context
) -> torch.Tensor:
    """Divide an entry by the penalty, once, if one of its tokens is in the context or
    repeats an earlier token.
    """
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
    return values.view(
        len(values), *(values.shape[1] if i == axis else 1 for i in range(axes))
    )


def cut(
    joints: Sequence[torch.Tensor], likeliest: Likeliest, blur: int, adaptive: bool
) -> list[torch.Tensor]:
    """Divide the joint of each order by its sum and apply the thresholds; valid only in
    rows of that order.
    """
    totals = likeliest.total.clamp(min=TINY)
    result = []
    for order, joint in enumerate(joints, start=1):
        share = joint / totals.view(-1, *[1] * order)
        result.append(
            share
            if order == 1
            else adaptive_threshold(share, likeliest.floor, blur, adaptive)
        )
    return result


def conditional(
    joints: Sequence[torch.Tensor], order: torch.Tensor, before: torch.Tensor
) -> torch.Tensor:
    """The distribution [rows, k] of the token after those with indices `before` [rows,
    tokens]; zero past the order.
    """
    rows = torch.arange(len(order), device=order.device)
    position = before.shape[1]
    result = torch.zeros(len(order), joints[position].shape[-1], device=order.device)
    for m, joint in enumerate(joints[position:], start=position + 1):
        weights = joint[(rows, *before.unbind(1))]
        weights = weights.flatten(2).sum(dim=2) if weights.dim() > 2 else weights
        share = weights / weights.sum(dim=1, keepdim=True).clamp(min=TINY)
        result = torch.where((order == m)[:, None], share, result)
    return result


def draw_ngrams(
    joints: Sequence[
        torch.Tensor
    ],  # of each order from 1, [rows, k_1, ..., k_m] float32
    likeliest: Likeliest,
    top: Top,
    blur: int,
    adaptive: bool,
    sampling: Sampling,  # with the positions for the first draft
) -> torch.Tensor:
    """Draw an n-gram of each row's order in proportion to the joint after the
    thresholds.

    Rows at temperature 0 take the likeliest n-gram. Each token's distribution given the
    tokens before it is cut to the row's top-k and top-p; the joint already includes the
    rows' temperatures.

    Returns:
        [rows, n] int64 tokens, -1 past the order and where a draft's distribution is
        invalid.
    """
    joints = cut(joints, likeliest, blur, adaptive)
    greedy = is_greedy(sampling.temperature)
    places = likeliest.places.clone()
    tokens = likeliest.tokens.clone()
    for position, ids in enumerate(top.token_ids):
        distribution = torch.ones_like(ids, dtype=torch.float32)
        if ids.shape[1] > 1:  # else the token is already emitted: nothing to draw
            distribution = truncated(
                conditional(joints, likeliest.order, places[:, :position]), sampling
            )
            drawn = draw_as(
                distribution,
                sampling.ahead(position - (top.first_token is not None)),
                ids,
            )
            places[:, position] = torch.where(greedy, places[:, position], drawn)
        tokens[:, position] = ids.gather(1, places[:, position : position + 1])[:, 0]
        if position:
            valid = (likeliest.order > position) & (distribution.sum(dim=-1) > 0)
            tokens[:, position].masked_fill_(~valid, INVALID)
    return tokens

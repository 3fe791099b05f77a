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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_ppd.kernels.sampling import (
    INVALID,
    Sampling,
    draw_as,
    is_greedy,
)

TINY = torch.finfo(torch.float32).tiny


class Ngrams(NamedTuple):
    """Counted n-grams of orders 2 to n; the entries of each order end with a sentinel
    that no n-gram has.
    """

    # [entries] int64, x_1 B^(n-1) + ... + x_n of the tokens' digits, ascending within
    # an order
    keys: Tensor
    ratios: Tensor  # [entries] float32, p^(x_1..x_n) / prod p^(x_i) (eq. 3)
    # [n] int64, where the entries of each order begin, and where the last ones end
    starts: Tensor
    bounds: tuple[int, ...]  # starts, on the host
    base: int  # B
    vocab_size: int
    # [vocabulary] int64, the digit of each token; None: its id
    columns: Tensor | None = None

    def to(self, device: torch.device | str) -> Ngrams:
        parts: Any = (x.to(device) if torch.is_tensor(x) else x for x in self)
        return Ngrams(*parts)

    def digits(self, token_ids: Tensor) -> Tensor:
        """The digit of each token."""
        if self.columns is None:
            return token_ids
        return self.columns[token_ids.clamp(0, self.vocab_size - 1)]


class Top(NamedTuple):
    """The heads' candidates."""

    # [heads, rows, k] float32 log-probabilities up to a constant per row, in descending
    # order
    scores: Tensor
    ids: Tensor  # [heads, rows, k] int64
    # [rows] int64, precedes the heads' tokens with probability 1
    first_token: Tensor | None = None
    # [heads - 1, rows, k, k] float32, log of the factor by which a candidate's
    # probability changes after a candidate of the head before; None: all are 0
    pairs: Tensor | None = None

    @property
    def token_ids(self) -> list[Tensor]:
        """The candidates [rows, k_i] for each of the n tokens."""
        given = [] if self.first_token is None else [self.first_token[:, None]]
        return [*given, *self.ids]


class Peaks(NamedTuple):
    """The likeliest n-gram in each part of every order's joint, from order 1, before
    division by the joint's sum.
    """

    sums: Tensor  # [n, rows, parts] float32
    entries: Tensor  # [n, rows, parts] float32
    places: Tensor  # [n, rows, parts] int64 in the flattened joint


class Likeliest(NamedTuple):
    """The order that Algorithm 1 takes for each row, and its likeliest n-gram."""

    # [rows] int64, number of tokens, 1..n; 1 where a joint is not finite
    order: Tensor
    # [rows] int64, tokens after the first; 1, which is INVALID, where a joint is not
    # finite
    drafts: Tensor
    tokens: Tensor  # [rows, n] int64, -1 past the order
    # [rows, n] int64, indices into each head's top-k, 0 past the order
    places: Tensor
    floor: Tensor  # [rows] float32, eps_b^(order - 1), 0 for order 1
    total: Tensor  # [rows] float32, sum of the joint


def mask(ids: Sequence[Tensor], ngrams: Ngrams) -> Tensor:
    """Ratios (eq. 3) of combinations of n heads' tokens [rows, k_i], 0 if not counted:
    [rows, k_1, ..., k_n] float32.
    """
    order = len(ids)
    wanted = ngrams.digits(ids[0])
    for axis, of_head in enumerate(ids[1:], start=1):
        digits = _on_axis(ngrams.digits(of_head), axis, axis + 1)
        wanted = torch.add(digits, wanted.unsqueeze(-1), alpha=ngrams.base)
    entries = slice(*ngrams.bounds[order - 2 : order])
    keys = ngrams.keys[entries]
    ratios = ngrams.ratios[entries]
    place = torch.searchsorted(keys, wanted)
    return ratios[place] * (keys[place] == wanted)


def find_peaks(
    top: Top, ngrams: Ngrams | None, with_joints: bool = True
) -> tuple[Peaks, list[Tensor]]:
    """Build each order's joint: the product of heads' probabilities in their top-k (eq.
    2) and of their pairs, times the mask (eq. 6, alpha_c = 1).

    The mask is a ratio of probabilities and may exceed 1. Without division by its sum,
    the joint might, too, and eps_b would mean nothing.

    Args:
        top: the candidates for n tokens.
        ngrams: n-grams of every order; None: the joint is the plain product.
        with_joints: whether to return the joints themselves.

    Returns:
        (peaks, joints [rows, k_1, ..., k_m] float32, not divided by their sums).
    """
    joints: list[Tensor] = []
    product = top.scores.new_ones(top.ids.shape[1])
    first = (
        [] if top.first_token is None else [top.scores.new_zeros(len(product), 1)]
    )
    for order, head in enumerate([*first, *top.scores], start=1):
        probs = torch.softmax(head, dim=-1)
        product = product.unsqueeze(-1) * _on_axis(probs, order - 1, order)
        place = order - 1 - len(first)  # of the head
        if top.pairs is not None and place > 0:
            ratios = top.pairs[place - 1].exp()
            between = [1] * (order - 2)
            product = product * ratios.view(
                len(ratios), *between, *ratios.shape[1:]
            )
        joint = product
        if ngrams is not None and order > 1:
            joint = product * mask(top.token_ids[:order], ngrams)
        joints.append(joint)
    return peaks_of(joints), joints


def peaks_of(joints: list[Tensor]) -> Peaks:
    """The peaks of joints that are not split into parts."""
    flat = [joint.flatten(1) for joint in joints]
    best = [joint.max(dim=1, keepdim=True) for joint in flat]
    return Peaks(
        torch.stack([joint.sum(dim=1, keepdim=True) for joint in flat]),
        torch.stack([peak.values for peak in best]),
        torch.stack([peak.indices for peak in best]),
    )


def back_off(peaks: Peaks, top: Top, eps_b: Tensor) -> Likeliest:
    """Take the highest order n whose likeliest n-gram has a share above eps_b^(n-1),
    else one token (Algorithm 1).

    The comparison is strict, so eps_b = 1 always backs off and eps_b = 0 never does
    while an entry is above 0.

    Args:
        peaks: the peaks of n orders.
        top: the candidates for n tokens.
        eps_b: [rows] float32 thresholds.
    """
    totals = peaks.sums.sum(dim=-1)
    best = peaks.entries.max(dim=-1, keepdim=True)
    values = best.values.squeeze(-1) / totals.clamp(min=TINY)
    finite = totals.isfinite().all(dim=0)
    order = torch.ones_like(eps_b, dtype=torch.int64)
    floor = torch.zeros_like(eps_b)
    for m in range(2, len(totals) + 1):
        # This goes upwards and Algorithm 1 downwards; the highest order that passes
        # wins in both.
        taken = finite & (values[m - 1] > eps_b ** (m - 1))
        order = torch.where(taken, m, order)
        floor = torch.where(taken, eps_b ** (m - 1), floor)
    taken_order = (order - 1).unsqueeze(0)
    order_places = peaks.places.gather(-1, best.indices).squeeze(-1)
    place = order_places.gather(0, taken_order).squeeze(0)
    total = totals.gather(0, taken_order).squeeze(0)
    places = torch.zeros(
        len(eps_b), len(totals), dtype=torch.int64, device=eps_b.device
    )
    tokens = torch.full_like(places, -1)
    for i, ids in reversed([*enumerate(top.token_ids)]):
        taken = i < order
        places[:, i] = torch.where(taken, place % ids.shape[1], 0)
        place = torch.where(taken, place // ids.shape[1], place)
        token = ids.gather(1, places[:, i : i + 1]).squeeze(1)
        tokens[:, i] = torch.where(taken, token, -1)
    drafts = torch.where(finite, order - 1, 1)
    return Likeliest(order, drafts, tokens, places, floor, total)


BINS = 256
# A Gaussian kernel of size 3, with the sigma of image libraries for it, 0.8
EDGE = 1 / (2 + math.exp(1 / (2 * 0.8**2)))
CENTER = 1 - 2 * EDGE


def gaussian_blur(joint: Tensor) -> Tensor:
    """Blur every token axis with a separable Gaussian of size 3, edges replicated."""
    for axis in range(1, joint.dim()):
        size = joint.shape[axis]
        places = torch.arange(size, device=joint.device)
        before = joint.index_select(axis, (places - 1).clamp(min=0))
        after = joint.index_select(axis, (places + 1).clamp(max=size - 1))
        joint = CENTER * joint + EDGE * (before + after)
    return joint


def otsu_threshold(values: Tensor) -> Tensor:
    """Otsu's threshold of each row: the histogram cut of greatest between-class
    variance.

    Args:
        values: [rows, entries], not negative. The bins are from a row's least to its
            greatest value.

    Returns:
        [rows]: values of at least the threshold are the upper class. A constant row
        keeps every entry.
    """
    least, greatest = torch.aminmax(values, dim=1, keepdim=True)
    width = (greatest - least).clamp(min=TINY)
    index = ((values - least) / width * BINS).long()
    ones = torch.ones_like(values, dtype=torch.float64)
    counts = ones.new_zeros(len(values), BINS)
    counts.scatter_add_(1, index.clamp(0, BINS - 1), ones)
    centers = torch.arange(BINS, device=values.device) + 0.5
    below = counts.cumsum(1)[
        :, :-1
    ]  # entries under cut i, which lies before bin i + 1
    mass = (counts * centers).cumsum(1)
    total = values.shape[1]
    # The classes' means differ by pull / (below * above), and the variance is below *
    # above * difference^2.
    pull = mass[:, :-1] * total - mass[:, -1:] * below
    variance = pull.square() / (below * (total - below)).clamp(min=1)
    cut = variance.argmax(dim=1, keepdim=True) + 1
    threshold = least + width * cut / BINS
    return torch.where(greatest > least, threshold, least).squeeze(1).float()


def adaptive_threshold(
    joint: Tensor,
    floor: Tensor,  # [rows] static threshold, eps_b^(n-1)
) -> Tensor:
    """Set entries under the static floor to 0, then those under Otsu's threshold
    (DynaMo, section 3.2.2).

    Otsu's threshold is computed from the blurred joint and compared with it, as in
    image pipelines; entries that survive keep their raw probability. A row's peak
    survives if it passed the floor.
    """
    kept = torch.where(joint >= _by_row(floor, joint), joint, 0.0)
    blurred = gaussian_blur(kept)
    threshold = otsu_threshold(blurred.flatten(1))
    peak = kept.flatten(1).amax(dim=1)
    survives = blurred >= _by_row(threshold, joint)
    survives |= kept >= _by_row(peak, joint)
    return torch.where(survives, kept, 0.0)


def _by_row(values: Tensor, joint: Tensor) -> Tensor:
    """View [rows] as [rows, 1, .., 1], to compare with a joint's entries."""
    return values.view(-1, *[1] * (joint.dim() - 1))


def _on_axis(values: Tensor, axis: int, axes: int) -> Tensor:
    """View [rows, k] as [rows, 1, .., k, .., 1] with k on a token axis."""
    shape = [1] * axes
    shape[axis] = values.shape[1]
    return values.view(len(values), *shape)


def cut(joints: Sequence[Tensor], likeliest: Likeliest) -> list[Tensor]:
    """Divide the joint of each order by its sum and apply the thresholds; valid only in
    rows of that order.
    """
    totals = likeliest.total.clamp(min=TINY)
    shares = [joint / _by_row(totals, joint) for joint in joints]
    return shares[:1] + [
        adaptive_threshold(share, likeliest.floor) for share in shares[1:]
    ]


def conditional(
    joints: Sequence[Tensor], order: Tensor, before: Tensor
) -> Tensor:
    """The distribution [rows, k] of the token after those with indices `before` [rows,
    tokens]; zero past the order.
    """
    rows = torch.arange(len(order), device=order.device)
    position = before.shape[1]
    result = torch.zeros(
        len(order), joints[position].shape[-1], device=order.device
    )
    for m, joint in enumerate(joints[position:], start=position + 1):
        weights = joint[(rows, *before.unbind(1))]
        if weights.dim() > 2:
            weights = weights.flatten(2).sum(dim=2)
        share = weights / weights.sum(dim=1, keepdim=True).clamp(min=TINY)
        result = torch.where((order == m)[:, None], share, result)
    return result


def truncated(probs: Tensor, sampling: Sampling) -> Tensor:
    """Cut distributions [rows, entries] to the rows' top-k, then to their top-p, and
    renormalize them, as vLLM does. Entries that tie with the last kept entry stay.
    """
    entries = probs.shape[-1]
    ascending = probs.sort(dim=-1).values
    last = (entries - sampling.top_k.long()).clamp(min=0)
    least = ascending.gather(-1, last[:, None])
    ascending = ascending.masked_fill(ascending < least, 0.0)
    below = ascending.cumsum(dim=-1)
    dropped_share = 1 - sampling.top_p.to(below.dtype)
    dropped = below <= dropped_share[:, None] * below[:, -1:]
    dropped[:, -1] = False
    ascending = ascending.masked_fill(dropped, 0.0)
    positive = torch.where(ascending > 0, ascending, torch.inf)
    least = positive.amin(dim=-1, keepdim=True)
    kept = torch.where(probs >= least, probs, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True).clamp(min=TINY)


def draw_ngrams(
    joints: Sequence[Tensor],  # of each order from 1, [rows, k_1, ..., k_m]
    likeliest: Likeliest,
    top: Top,
    sampling: Sampling,  # with the positions for the first draft
) -> Tensor:
    """Draw an n-gram of each row's order in proportion to the joint after the
    thresholds.

    Rows at temperature 0 take the likeliest n-gram. Each token's distribution given the
    tokens before it is cut to the row's top-k and top-p; the joint already includes the
    rows' temperatures.

    Returns:
        [rows, n] int64 tokens, -1 past the order and where a draft's distribution is
        invalid.
    """
    joints = cut(joints, likeliest)
    greedy = is_greedy(sampling.temperature)
    places = likeliest.places.clone()
    tokens = likeliest.tokens.clone()
    given = len(top.token_ids) - len(top.ids)  # 1 with a first token, else 0
    for position, ids in enumerate(top.ids, start=given):
        probs = conditional(joints, likeliest.order, places[:, :position])
        probs = truncated(probs, sampling)
        drawn = draw_as(probs, sampling.ahead(position - given), ids)
        places[:, position] = torch.where(greedy, places[:, position], drawn)
        token = ids.gather(1, places[:, position : position + 1]).squeeze(1)
        valid = (likeliest.order > position) & (probs.sum(dim=-1) > 0)
        tokens[:, position] = torch.where(valid, token, INVALID)
    return tokens

# SPDX-License-Identifier: Apache-2.0
"""DynaMo's choice of how many tokens to emit, and which (Algorithm 1), for all rows at once."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_ppd.heads.dynamo.mask import PairTables
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.joint import (
    Likeliest,
    Ngrams,
    Peaks,
    Top,
    back_off,
    conditional,
    cut,
    draw_ngrams,
    find_peaks,
)
from vllm_ppd.kernels.sampling import Sampling


@dataclass
class JointChoice:
    """The result of Algorithm 1 for each row."""

    likeliest: Likeliest
    top: Top
    # For each order from 1, [rows, k_1, ..., k_m]: the joints without thresholds
    uncut: list[Tensor]

    @cached_property
    def joints(self) -> list[Tensor]:
        """The joint of each order from 1, [rows, k_1, ..., k_m], thresholded in rows of
        that order.
        """
        return cut(self.uncut, self.likeliest)

    @property
    def order(self) -> Tensor:
        """[rows] int64: tokens to take, 1..n."""
        return self.likeliest.order

    def draw(self, sampling: Sampling) -> Tensor:
        """See draw_ngrams."""
        draw = chosen(draw_ngrams, self.order)
        return draw(self.uncut, self.likeliest, self.top, sampling)

    def probabilities(self, tokens: Tensor) -> Tensor:
        """Probabilities with which draw() draws tokens [rows, n] from the second on,
        given those before: [rows, n - 1].

        0 for a token outside its head's top-k, for those after such a one, and past the
        order.
        """
        places = torch.zeros_like(tokens)
        inside = torch.ones_like(tokens[:, 0], dtype=torch.bool)
        result = []
        for position, ids in enumerate(self.top.token_ids[1:], start=1):
            q = conditional(self.joints, self.order, places[:, :position])
            hit = ids == tokens[:, position, None]
            place = hit.int().argmax(dim=1)
            places[:, position] = place
            inside = inside & hit.any(dim=1)
            q = q.gather(1, place[:, None]).squeeze(1)
            result.append(torch.where(inside, q, 0.0))
        return torch.stack(result, dim=1)


class Candidates(NamedTuple):
    """The heads' candidates for each row and their joints, which do not depend on eps_b."""

    top: Top
    peaks: Peaks
    # For each order from 1, [rows, k_1, ..., k_m], not divided by their sums; empty if
    # only the likeliest n-gram is read
    uncut: list[Tensor]

    def back_off(
        self,
        eps_b: Tensor,  # [rows]
        most: int | None = None,  # highest order to take (None: all)
    ) -> JointChoice:
        """The choice of n. A peak above its floor passes every threshold, so n and the
        likeliest n-gram need no thresholding.
        """
        first = self.top.first_token
        heads = None if most is None else most - (first is not None)
        top = self.top._replace(
            scores=self.top.scores[:heads], ids=self.top.ids[:heads]
        )
        peaks = Peaks(*(part[:most] for part in self.peaks))
        likeliest = chosen(back_off, eps_b)(peaks, top, eps_b)
        return JointChoice(likeliest, top, self.uncut[:most])


def candidates(
    # [heads, rows, vocabulary] of the heads from 1 (2 with first_token) on
    scores: Tensor,
    k: int,  # candidates of each head
    ngrams: Ngrams | None = None,
    first_token: Tensor | None = None,  # [rows] int64
    token_ids: Tensor
    | None = None,  # [columns] token of each column of the scores (None: every token)
    with_joints: bool = True,  # whether the choice needs more than its likeliest n-gram
    tables: PairTables | None = None,  # of the learned mask
    heat: Tensor | None = None,  # [rows, 1] or [] divisor of the scores
) -> Candidates:
    """Algorithm 1 down to the masked joints of every order.

    Scores are log-probabilities up to a constant a row: logits, which the temperature
    divides.

    With first_token, head 1 is replaced by that token with probability 1, and its
    logits are not needed: the joint is then conditioned on the token that the target
    has sampled, and thresholds apply to the conditional. Without counted n-grams the
    joint is the plain product.
    """
    best = scores.float().topk(min(k, scores.shape[-1]), dim=-1)
    ids = best.indices if token_ids is None else token_ids[best.indices]
    heat = scores.new_ones(()) if heat is None else heat
    top = Top(best.values / heat, ids, first_token)
    if tables is not None and len(ids) > 1:
        alone = top.scores[1:].log_softmax(-1).unsqueeze(2)
        pairs = tables.logits(best.indices) / heat.unsqueeze(-1)
        top = top._replace(pairs=(alone + pairs).log_softmax(-1) - alone)
    return Candidates(top, *chosen(find_peaks, ids)(top, ngrams, with_joints))

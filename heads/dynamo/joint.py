# SPDX-License-Identifier: Apache-2.0
"""DynaMo's choice of how many tokens to emit, and which (Algorithm 1), for all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_ppd.heads.dynamo.config import JointSettings
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.joint import (
    TINY,
    Likeliest,
    Ngrams,
    Peaks,
    Top,
    adaptive_threshold,
    back_off,
    conditional,
    cut,
    draw_ngrams,
    find_peaks,
    peaks_of,
    penalise_repetition,
)
from vllm_ppd.kernels.sampling import Sampling


@dataclass
class JointChoice:
    """The result of Algorithm 1 for each row."""

    likeliest: Likeliest
    top: Top
    candidates: Candidates  # with the joints before thresholding
    # For each order from 1, [rows, k_1, ..., k_m]: the joints without thresholds
    uncut: list[torch.Tensor]
    settings: JointSettings

    @cached_property
    def joints(self) -> list[torch.Tensor]:
        """The joint of each order from 1, [rows, k_1, ..., k_m]: penalised, and
        thresholded in rows of that order.
        """
        return cut(
            self.uncut, self.likeliest, self.settings.blur, self.settings.adaptive
        )

    @property
    def order(self) -> torch.Tensor:
        """[rows] int64: tokens to take, 1..n."""
        return self.likeliest.order

    def draw(self, sampling: Sampling) -> torch.Tensor:
        """See draw_ngrams."""
        draw = chosen(draw_ngrams, self.order)
        settings = self.settings
        tokens: torch.Tensor = draw(
            self.uncut,
            self.likeliest,
            self.top,
            settings.blur,
            settings.adaptive,
            sampling,
        )
        return tokens

    def probabilities(self, tokens: torch.Tensor) -> torch.Tensor:
        """Probabilities with which draw() draws tokens [rows, n] from the second on,
        given those before: [rows, n - 1].

        0 for a token outside its head's top-k, for those after such a one, and past the
        order.
        """
        places, inside = self._places_of(tokens)
        result = []
        for position in range(1, places.shape[1]):
            q = conditional(self.joints, self.order, places[:, :position])
            q = q.gather(1, places[:, position : position + 1]).squeeze(1)
            result.append(torch.where(inside[:, position], q, 0.0))
        return torch.stack(result, dim=1)

    def _places_of(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of tokens [rows, n] in each head's top-k (0 for the first), and
        whether all so far are in it.
        """
        hits = [
            ids == tokens[:, i : i + 1] for i, ids in enumerate(self.top.token_ids)
        ][1:]
        places = torch.zeros_like(tokens)
        inside = torch.ones_like(tokens, dtype=torch.bool)
        places[:, 1:] = torch.stack([hit.int().argmax(dim=1) for hit in hits], dim=1)
        inside[:, 1:] = (
            torch.stack([hit.any(dim=1) for hit in hits], dim=1).cumprod(dim=1).bool()
        )
        return places, inside


@dataclass
class Candidates:
    """The heads' candidates for each row and their joints, which do not depend on eps_b."""

    top: Top
    ngrams: Ngrams | None
    alpha_c: float
    with_joints: bool  # whether joints are read, not only the likeliest n-gram

    @cached_property
    def peaks(self) -> tuple[Peaks, list[torch.Tensor]]:
        """See find_peaks."""
        return chosen(find_peaks, self.top.ids)(
            self.top, self.ngrams, self.alpha_c, self.with_joints
        )

    @cached_property
    def joints(self) -> list[torch.Tensor]:
        """The joint of each order from 1, [rows, k_1, ..., k_m] of sum 1 a row, or zero
        where every entry is masked.
        """
        totals = self.peaks[0].sums.sum(dim=-1).clamp(min=TINY)
        return [
            joint / totals[i].view(-1, *[1] * (i + 1))
            for i, joint in enumerate(self.peaks[1])
        ]

    def back_off(
        self,
        settings: JointSettings,
        eps_b: torch.Tensor
        | None = None,  # [rows], replaces the settings' value where it is not NaN
        context: torch.Tensor
        | None = None,  # [rows, tokens] recent tokens, for the repetition penalty
        most: int | None = None,  # highest order to take (None: all)
    ) -> JointChoice:
        """Thresholds, repetition penalty and the choice of n."""
        first = self.top.first_token
        heads = None if most is None else most - (first is not None)
        top = Top(self.top.scores[:heads], self.top.ids[:heads], first)
        eps_b = (
            torch.full_like(top.scores[0, :, 0], torch.nan)
            if eps_b is None
            else eps_b.float()
        )
        choose = chosen(back_off, eps_b)
        if settings.repetition_penalty == 1:
            # A peak above its floor passes every threshold, so n and the likeliest
            # n-gram need no thresholding.
            peaks = Peaks(*(part[:most] for part in self.peaks[0]))
            joints = self.peaks[1][:most]
            return JointChoice(
                choose(peaks, top, eps_b, settings.eps_b), top, self, joints, settings
            )
        ids = top.token_ids
        eps = torch.where(eps_b.isnan(), settings.eps_b, eps_b)
        seen = (
            None
            if context is None
            else [(i[:, :, None] == context[:, None]).any(-1) for i in ids]
        )
        if seen is not None and first is not None:
            # The token is already emitted, so it is not penalised
            seen[0] = torch.zeros_like(seen[0])
        joints = self.joints[:1]
        for m, joint in enumerate(self.joints[1:most], start=2):
            values = adaptive_threshold(
                joint, eps ** (m - 1), settings.blur, settings.adaptive
            )
            joints.append(
                penalise_repetition(
                    values, ids[:m], settings.repetition_penalty, seen and seen[:m]
                )
            )
        peaks = peaks_of(joints)
        likeliest = choose(
            peaks._replace(sums=torch.ones_like(peaks.sums)), top, eps_b, settings.eps_b
        )
        likeliest = likeliest._replace(floor=torch.zeros_like(eps))
        return JointChoice(
            likeliest,
            top,
            self,
            joints,
            settings.model_copy(update={"adaptive": False}),
        )


def candidates(
    scores: Sequence[torch.Tensor]
    | torch.Tensor,  # [rows, vocabulary] of each head from 1 (2 with first_token) on
    settings: JointSettings,
    ngrams: Ngrams | None = None,
    first_token: torch.Tensor | None = None,  # [rows] int64
    token_ids: torch.Tensor
    | None = None,  # [columns] token of each column of the scores (None: every token)
    with_joints: bool = True,  # whether the choice needs more than its likeliest n-gram
) -> Candidates:
    """Algorithm 1 down to the masked joints of every order.

    Scores are log-probabilities up to a constant a row: logits, divided by the
    temperature.

    With first_token, head 1 is replaced by that token with probability 1, and its
    logits are not needed: the joint is then conditioned on the token that the target
    has sampled, and thresholds apply to the conditional. Without a mask (none counted,
    or alpha_c = 0) the joint is the plain product.
    """
    stacked = scores if isinstance(scores, torch.Tensor) else torch.stack([*scores])
    top = stacked.float().topk(min(settings.k, stacked.shape[-1]), dim=-1)
    ids = top.indices if token_ids is None else token_ids[top.indices]
    ngrams = ngrams if settings.alpha_c else None
    with_joints = with_joints or settings.repetition_penalty != 1
    return Candidates(
        Top(top.values, ids, first_token), ngrams, settings.alpha_c, with_joints
    )

# SPDX-License-Identifier: Apache-2.0
"""DynaMo's choice of how many tokens to emit, and of which (Algorithm 1), for all rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_ppd.heads.dynamo.config import JointSettings
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.joint_threshold import (
    adaptive_threshold,
    apply_mask,
    joints,
    penalise_repetition,
)
from vllm_ppd.kernels.sampling import Sampling, draw, drawn_from, is_greedy, truncated


@dataclass
class JointChoice:
    """What Algorithm 1 chose for each row."""

    order: torch.Tensor  # [rows] int64: tokens to take, 1..n
    token_ids: list[torch.Tensor]  # [rows, k_i] of each head, in descending order of probability
    peaks: dict[int, torch.Tensor]  # order -> [rows] place of the likeliest n-gram in the flattened joint
    threshold: Callable[[], dict[int, torch.Tensor]]  # what makes the joints
    masked: dict[int, torch.Tensor]  # the joints before any threshold
    finite: torch.Tensor  # [rows] bool: every order's joint is

    @cached_property
    def joints(self) -> dict[int, torch.Tensor]:
        """order -> [rows, k_1, ..., k_order], thresholded and penalised, not normalised."""
        return self.threshold()

    def best(self) -> torch.Tensor:
        """The likeliest n-gram of each row's order: [rows, n] int64, -1 past the order."""
        return self._tokens(self._places(self.peaks))

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """An n-gram of each row's order, in proportion to its entry: [rows, n] int64, -1 past the order."""
        return self.draw(Sampling(torch.ones_like(self.order, dtype=torch.float32)), generator)[0]

    def draw(
        self, sampling: Sampling, generator: torch.Generator | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """An n-gram of each row's order, token after token, with the distribution that each one was drawn from.

        Args:
            sampling: of each row; the joint is at the rows' temperatures already, and rows at 0 take the likeliest
                n-gram. Each token's distribution given those before it is cut to the row's top-k and top-p.
            generator: where the samples come from.

        Returns:
            (tokens [rows, n], -1 past the order; of each position from 2 the probabilities of its head's top-k
            [rows, k_i]: one-hot where greedy, all zero past the order).
        """
        greedy, best = is_greedy(sampling.temperature), self._places(self.peaks)
        places, result = torch.zeros_like(best), []
        for position in range(len(self.token_ids)):
            if self.token_ids[position].shape[1] == 1:  # a token that is emitted already: nothing to draw
                distribution = torch.ones_like(self.token_ids[position], dtype=torch.float32)
            else:
                distribution = truncated(self._conditional(places, position), sampling)
                places[:, position] = torch.where(greedy, best[:, position], draw(distribution, generator))
            if position:
                q = drawn_from(distribution, places[:, position], greedy)
                result.append(q * (self.order > position)[:, None])
        return self._tokens(places), result

    def probabilities(
        self,
        tokens: torch.Tensor,  # [rows, n], the first of them that of select's first_token
    ) -> torch.Tensor:
        """With which draw would have drawn each token from the second on, given those before it: [rows, n - 1].

        0 for a token outside its head's top-k, for those after such a one, and past the order.
        """
        places, inside = self._places_of(tokens)
        result = []
        for position in range(1, len(self.token_ids)):
            q = self._conditional(places, position).gather(1, places[:, position : position + 1]).squeeze(1)
            result.append(torch.where(inside[:, position], q, 0.0))
        return torch.stack(result, dim=1)

    def confidence(
        self,
        tokens: torch.Tensor,  # [rows, n], the first of them that of select's first_token
    ) -> torch.Tensor:
        """The joint's probability of each token from the second on given those before it, before any threshold.

        Thresholds leave a likely n-gram as the only one, so that it would always be sure.

        Returns:
            [rows, n - 1]: each joint's entry over that of the order below, at most 1; 0 as in `probabilities`.
        """
        places, inside = self._places_of(tokens)
        rows = torch.arange(len(tokens), device=tokens.device)
        before, result = self.masked[1][rows, places[:, 0]], []
        for position in range(1, len(self.token_ids)):
            entry = self.masked[position + 1][(rows, *places[:, : position + 1].unbind(1))]
            share = (entry / before.clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1.0)
            result.append(torch.where(inside[:, position] & (self.order > position), share, 0.0))
            before = entry
        return torch.stack(result, dim=1)

    def _places_of(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of tokens [rows, n] in each head's top-k, the first one's 0, and whether all up to there are in it."""
        hits = [ids == tokens[:, i : i + 1] for i, ids in enumerate(self.token_ids)][1:]
        places, inside = torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool)
        places[:, 1:] = torch.stack([hit.int().argmax(dim=1) for hit in hits], dim=1)
        inside[:, 1:] = torch.stack([hit.any(dim=1) for hit in hits], dim=1).cumprod(dim=1).bool()
        return places, inside

    def _conditional(self, places: torch.Tensor, position: int) -> torch.Tensor:
        """The joint's distribution at a position given the tokens before it: [rows, k_i], zero past the order."""
        rows = torch.arange(len(self.order), device=self.order.device)
        distribution = torch.zeros(self.token_ids[position].shape, device=self.order.device)
        for order, values in self.joints.items():
            if order <= position:
                continue
            conditional = values[(rows, *places[:, :position].unbind(1))]
            conditional = conditional.flatten(2).sum(dim=2) if conditional.dim() > 2 else conditional
            conditional = conditional / conditional.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            distribution = torch.where((self.order == order)[:, None], conditional, distribution)
        return distribution

    def _places(self, index: dict[int, torch.Tensor]) -> torch.Tensor:
        """From places in the flattened joints to those in each head's top-k: [rows, n], 0 past the order."""
        result = torch.zeros(len(self.order), len(self.token_ids), dtype=torch.int64, device=self.order.device)
        for order, at in index.items():
            columns = []
            for ids in reversed(self.token_ids[1:order]):
                columns.append(at % ids.shape[1])
                at = at // ids.shape[1]
            position = torch.stack([at, *reversed(columns)], dim=1)
            result[:, :order] = torch.where((self.order == order)[:, None], position, result[:, :order])
        return result

    def _tokens(self, places: torch.Tensor) -> torch.Tensor:
        tokens = torch.stack([ids.gather(1, places[:, i : i + 1])[:, 0] for i, ids in enumerate(self.token_ids)], dim=1)
        past = torch.arange(tokens.shape[1], device=tokens.device) >= self.order[:, None]
        return tokens.masked_fill(past, -1)


@dataclass
class Candidates:
    """The joints of each row before any threshold: what does not depend on eps_b."""

    token_ids: list[torch.Tensor]  # [rows, k_i] of each head, in descending order of probability
    joints: dict[int, torch.Tensor]  # order -> [rows, k_1, ..., k_order], masked
    given_first: bool  # head 1 stands for a token that is emitted already

    @cached_property
    def peaks(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """order -> (value of the likeliest n-gram, its place in the flattened joint), [rows] each."""
        return {order: _peak(values) for order, values in self.joints.items()}

    def back_off(
        self,
        settings: JointSettings,
        eps_b: torch.Tensor | None = None,  # [rows], in place of the settings'
        context: torch.Tensor | None = None,  # [rows, tokens] recent tokens, for the repetition penalty
        most: int | None = None,  # highest order to take (None: all)
    ) -> JointChoice:
        """Thresholds, repetition penalty and the choice of n."""
        ids = self.token_ids[:most]
        rows, device = len(ids[0]), ids[0].device
        eps = torch.full((rows,), settings.eps_b, device=device) if eps_b is None else eps_b.float()
        floors = {m: eps ** (m - 1) for m in range(2, len(ids) + 1)}

        def threshold() -> dict[int, torch.Tensor]:
            seen = None if context is None else [(i[:, :, None] == context[:, None]).any(-1) for i in ids]
            if seen is not None and self.given_first:
                seen[0] = torch.zeros_like(seen[0])  # the token is emitted already: nothing to penalise in it
            joints = {1: self.joints[1]}
            for m, floor in floors.items():
                cut = chosen(adaptive_threshold, floor)
                values = cut(self.joints[m], floor, settings.blur, settings.adaptive)
                joints[m] = penalise_repetition(values, ids[:m], settings.repetition_penalty, seen and seen[:m])
            return joints

        if settings.repetition_penalty == 1:
            # A peak over its floor outlives every threshold: n and the likeliest n-gram are known without them.
            peaks, make = {m: self.peaks[m] for m in range(1, len(ids) + 1)}, threshold
        else:
            joints = threshold()
            peaks, make = {m: _peak(values) for m, values in joints.items()}, lambda: joints
        order = torch.ones(rows, dtype=torch.int64, device=device)
        for m, floor in floors.items():
            # Upwards where Algorithm 1 goes downwards: the largest order that passes wins in both. Strictly over the
            # floor, so that eps_b = 1 always backs off and eps_b = 0 never does where an entry is left.
            order = torch.where(peaks[m][0] > floor, m, order)
        finite = torch.stack([value for value, _ in peaks.values()]).isfinite().all(dim=0)
        return JointChoice(order, ids, {m: place for m, (_, place) in peaks.items()}, make, self.joints, finite)


def _peak(joint: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, places = joint.flatten(1).max(dim=1)
    return values, places


def candidates(
    scores: Sequence[torch.Tensor] | torch.Tensor,  # [rows, vocabulary] of each head from 1 (2, with first_token) on
    settings: JointSettings,
    cooccurrence: CoOccurrence | None = None,
    first_token: torch.Tensor | None = None,  # [rows] int64
    token_ids: torch.Tensor | None = None,  # [columns] what the columns of the scores stand for (None: every token)
) -> Candidates:
    """Algorithm 1 down to the masked joints of every order.

    Scores are log-probabilities up to a constant a row: logits, divided by the temperature.

    With first_token, that token alone with probability 1 stands for head 1, whose logits are not needed: the joint is
    then conditioned on what the target has sampled, and thresholds apply to the conditional.
    Without a mask of an order (none counted, or alpha_c = 0) the joint of that order is the plain product.
    """
    stacked = scores if isinstance(scores, torch.Tensor) else torch.stack([*scores])
    top = stacked.float().topk(min(settings.k, scores[0].shape[-1]), dim=-1)
    values = list(top.values)
    ids = list(top.indices if token_ids is None else token_ids[top.indices])
    if first_token is not None:
        values.insert(0, torch.zeros_like(values[0][:, :1]))
        ids.insert(0, first_token[:, None])
    of_order = dict(enumerate(joints(values), start=1))
    if cooccurrence is not None and settings.alpha_c:
        for m in of_order.keys() & cooccurrence.keys.keys():
            of_order[m] = apply_mask(of_order[m], cooccurrence.mask(ids[:m]), settings.alpha_c)
    return Candidates(ids, of_order, first_token is not None)


def select(
    scores: Sequence[torch.Tensor] | torch.Tensor,  # [rows, vocabulary] of each head from 1 (2, with first_token) on
    settings: JointSettings,
    cooccurrence: CoOccurrence | None = None,
    first_token: torch.Tensor | None = None,  # [rows] int64
    eps_b: torch.Tensor | None = None,  # [rows], in place of the settings'
    context: torch.Tensor | None = None,  # [rows, tokens] recent tokens, for the repetition penalty
    token_ids: torch.Tensor | None = None,  # [columns] what the columns of the scores stand for (None: every token)
) -> JointChoice:
    """Algorithm 1 down to the choice of n: candidates, then Candidates.back_off."""
    return candidates(scores, settings, cooccurrence, first_token, token_ids).back_off(settings, eps_b, context)

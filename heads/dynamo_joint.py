# SPDX-License-Identifier: Apache-2.0
"""DynaMo's choice of how many tokens to emit, and of which (Algorithm 1), for all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_ppd.heads.cooccurrence import CoOccurrence
from vllm_ppd.heads.joint_settings import JointSettings
from vllm_ppd.kernels.joint_threshold import (
    adaptive_threshold,
    apply_mask,
    exceeds,
    joint,
    penalise_repetition,
)
from vllm_ppd.kernels.sampling import draw, drawn_from


@dataclass
class JointChoice:
    """What Algorithm 1 chose for each row."""

    order: torch.Tensor  # [rows] int64: tokens to take, 1..n
    token_ids: list[torch.Tensor]  # [rows, k_i] of each head, in descending order of probability
    joints: dict[int, torch.Tensor]  # order -> [rows, k_1, ..., k_order], thresholded and penalised, not normalised

    def best(self) -> torch.Tensor:
        """The likeliest n-gram of each row's order: [rows, n] int64, -1 past the order."""
        return self._tokens(self._pick(None, None))

    def sample(
        self,
        generator: torch.Generator | None = None,
        greedy: torch.Tensor | None = None,  # [rows] bool: rows that take the likeliest
    ) -> torch.Tensor:
        """An n-gram of each row's order, in proportion to its entry: [rows, n] int64, -1 past the order."""
        return self._tokens(self._pick(generator, torch.zeros_like(self.order).bool() if greedy is None else greedy))

    def draw(
        self, greedy: torch.Tensor, generator: torch.Generator | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As sample, with the distribution that each token from the second on was drawn from.

        Returns:
            (tokens [rows, n], of each position from 2 the probabilities of its head's top-k given the tokens before
            it [rows, k_i]: one-hot where greedy, all zero past the order).
        """
        places = self._pick(generator, greedy)
        result = []
        for position in range(1, len(self.token_ids)):
            found = self._conditional(places, position)
            q = drawn_from(found, places[:, position], greedy)
            result.append(q * (self.order > position)[:, None])
        return self._tokens(places), result

    def probabilities(
        self,
        tokens: torch.Tensor,  # [rows, n], the first of them that of select's first_token
    ) -> torch.Tensor:
        """With which draw would have drawn each token from the second on, given those before it: [rows, n - 1].

        0 for a token outside its head's top-k, for those after such a one, and past the order.
        """
        inside = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
        places = torch.zeros_like(tokens)
        result = []
        for position in range(1, len(self.token_ids)):
            hits = self.token_ids[position] == tokens[:, position : position + 1]
            places[:, position] = hits.int().argmax(dim=1)
            inside = inside & hits.any(dim=1)
            q = self._conditional(places, position).gather(1, places[:, position : position + 1]).squeeze(1)
            result.append(torch.where(inside, q, 0.0))
        return torch.stack(result, dim=1)

    def _conditional(self, places: torch.Tensor, position: int) -> torch.Tensor:
        """The joint's distribution at a position given the tokens before it: [rows, k_i], zero past the order."""
        rows = torch.arange(len(self.order), device=self.order.device)
        found = torch.zeros(self.token_ids[position].shape, device=self.order.device)
        for order, values in self.joints.items():
            if order <= position:
                continue
            given = values[(rows, *places[:, :position].unbind(1))]
            given = given.flatten(2).sum(dim=2) if given.dim() > 2 else given
            given = given / given.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            found = torch.where((self.order == order)[:, None], given, found)
        return found

    def _pick(self, generator: torch.Generator | None, greedy: torch.Tensor | None) -> torch.Tensor:
        """Places of the chosen n-gram in each head's top-k: [rows, n], 0 past the order. Without greedy, the best."""
        rows, n = len(self.order), len(self.token_ids)
        result = torch.zeros(rows, n, dtype=torch.int64, device=self.order.device)
        for order, values in self.joints.items():
            flat = values.flatten(1)
            index = flat.argmax(dim=1)
            if greedy is not None:
                index = torch.where(greedy, index, draw(flat, generator))
            columns = []
            for ids in reversed(self.token_ids[:order]):
                columns.append(index % ids.shape[1])
                index = index // ids.shape[1]
            chosen = torch.stack(columns[::-1], dim=1)
            result[:, :order] = torch.where((self.order == order)[:, None], chosen, result[:, :order])
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
        seen = None if context is None else [(i[:, :, None] == context[:, None]).any(-1) for i in ids]
        if seen is not None and self.given_first:
            seen[0] = torch.zeros_like(seen[0])  # the token is emitted already: nothing to penalise in it
        order = torch.ones(rows, dtype=torch.int64, device=device)
        joints = {1: self.joints[1]}
        for m in range(2, len(ids) + 1):
            threshold = eps ** (m - 1)
            values = adaptive_threshold(self.joints[m], threshold, settings.blur, settings.adaptive)
            values = penalise_repetition(values, ids[:m], settings.repetition_penalty, seen and seen[:m])
            joints[m] = values
            # The loop runs upwards where Algorithm 1 runs downwards: the largest order that passes wins in both.
            order = torch.where(exceeds(values, threshold), m, order)
        return JointChoice(order, ids, joints)


def candidates(
    log_probs: Sequence[torch.Tensor],  # [rows, vocabulary] of each head, head 1 first (head 2, with first_token)
    settings: JointSettings,
    cooccurrence: CoOccurrence | None = None,
    first_token: torch.Tensor | None = None,  # [rows] int64
    token_ids: torch.Tensor | None = None,  # [columns] what the columns of log_probs stand for (None: every token)
) -> Candidates:
    """Algorithm 1 down to the masked joints of every order.

    With first_token, that token alone with probability 1 stands for head 1, whose logits are not needed: the joint is
    then conditioned on what the target has sampled, and thresholds apply to the conditional.
    Without a mask of an order (none counted, or alpha_c = 0) the joint of that order is the plain product.
    """
    probs, ids = [], []
    if first_token is not None:
        probs.append(torch.ones(len(first_token), 1, device=first_token.device))
        ids.append(first_token[:, None])
    for head in log_probs:
        top = head.float().topk(min(settings.k, head.shape[-1]), dim=-1)
        probs.append(top.values.exp())
        ids.append(top.indices if token_ids is None else token_ids[top.indices])
    joints = {1: joint(probs[:1])}
    for m in range(2, len(ids) + 1):
        joints[m] = joint(probs[:m])
        if cooccurrence is not None and m in cooccurrence.keys:
            joints[m] = apply_mask(joints[m], cooccurrence.mask(ids[:m]), settings.alpha_c)
    return Candidates(ids, joints, first_token is not None)


def select(
    log_probs: Sequence[torch.Tensor],  # [rows, vocabulary] of each head, head 1 first (head 2, with first_token)
    settings: JointSettings,
    cooccurrence: CoOccurrence | None = None,
    first_token: torch.Tensor | None = None,  # [rows] int64
    eps_b: torch.Tensor | None = None,  # [rows], in place of the settings'
    context: torch.Tensor | None = None,  # [rows, tokens] recent tokens, for the repetition penalty
    token_ids: torch.Tensor | None = None,  # [columns] what the columns of log_probs stand for (None: every token)
) -> JointChoice:
    """Algorithm 1 down to the choice of n: candidates, then Candidates.back_off."""
    return candidates(log_probs, settings, cooccurrence, first_token, token_ids).back_off(settings, eps_b, context)

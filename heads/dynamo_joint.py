# SPDX-License-Identifier: Apache-2.0
"""DynaMo's choice of how many tokens to emit, and of which (Algorithm 1), for all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_ppd.heads.cooccurrence import CoOccurrence
from vllm_ppd.kernels.joint_threshold import (
    adaptive_threshold,
    apply_mask,
    exceeds,
    joint,
    penalise_repetition,
)


class JointSettings(BaseModel):
    """Settings of the joint; defaults are the paper's (appendix A.1) where it names one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    k: int = Field(50, ge=1, description="top-k of each head")
    alpha_c: float = Field(1.0, ge=0, description="power of the co-occurrence mask (eq. 6); 0 leaves it out")
    eps_b: float = Field(0.5, ge=0, le=1, description="back-off threshold: 0 always takes n tokens, 1 always one")
    blur: int = Field(3, ge=1, description="kernel of the Gaussian blur before Otsu's threshold; 1 is none")
    adaptive: bool = Field(True, description="Otsu's threshold on top of the static one")
    repetition_penalty: float = Field(1.0, ge=1, description="divides n-grams that repeat a token (the paper: 1.1)")

    @field_validator("blur")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("must be odd")
        return value


@dataclass
class JointChoice:
    """What Algorithm 1 chose for each row."""

    order: torch.Tensor  # [rows] int64: tokens to take, 1..n
    token_ids: list[torch.Tensor]  # [rows, k_i] of each head, in descending order of probability
    joints: dict[int, torch.Tensor]  # order -> [rows, k_1, ..., k_order], thresholded and penalised, not normalised

    def best(self) -> torch.Tensor:
        """The likeliest n-gram of each row's order: [rows, n] int64, -1 past the order."""
        return self._pick({n: values.flatten(1).argmax(dim=1) for n, values in self.joints.items()})

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """An n-gram of each row's order, in proportion to its entry: [rows, n] int64, -1 past the order."""
        picks = {}
        for n, values in self.joints.items():
            flat = values.flatten(1)
            noise = torch.empty_like(flat).exponential_(
                generator=generator
            )  # an exponential race is a multinomial draw
            picks[n] = (flat / noise).argmax(dim=1)
        return self._pick(picks)

    def _pick(self, flat: dict[int, torch.Tensor]) -> torch.Tensor:
        rows, n = len(self.order), len(self.token_ids)
        result = torch.full((rows, n), -1, dtype=torch.int64, device=self.order.device)
        for order, index in flat.items():
            sizes = [ids.shape[1] for ids in self.token_ids[:order]]
            columns = []
            for size, ids in zip(reversed(sizes), reversed(self.token_ids[:order]), strict=True):
                columns.append(ids.gather(1, (index % size)[:, None]).squeeze(1))
                index = index // size
            chosen = torch.stack(columns[::-1], dim=1)
            here = self.order == order
            result[:, :order] = torch.where(here[:, None], chosen, result[:, :order])
        return result


def select(
    log_probs: Sequence[torch.Tensor],  # [rows, vocabulary] of each head, head 1 first
    settings: JointSettings,
    cooccurrence: CoOccurrence | None = None,
    first_token: torch.Tensor | None = None,  # [rows] int64
    eps_b: torch.Tensor | None = None,  # [rows], in place of the settings'
    context: torch.Tensor | None = None,  # [rows, tokens] recent tokens, for the repetition penalty
) -> JointChoice:
    """Algorithm 1 down to the choice of n.

    With first_token, head 1's top-k is that token alone with probability 1: the joint is then conditioned on the token
    that the target has sampled, also where it is outside head 1's top-k, and thresholds apply to the conditional.
    Without a mask of an order (none counted, or alpha_c = 0) the joint of that order is the plain product.
    """
    rows, n = len(log_probs[0]), len(log_probs)
    device = log_probs[0].device
    eps = torch.full((rows,), settings.eps_b, device=device) if eps_b is None else eps_b.float()
    probs, ids = [], []
    for position, head in enumerate(log_probs):
        if position == 0 and first_token is not None:
            probs.append(torch.ones(rows, 1, device=device))
            ids.append(first_token[:, None])
            continue
        top = head.float().topk(min(settings.k, head.shape[-1]), dim=-1)
        probs.append(top.values.exp())
        ids.append(top.indices)
    seen = None if context is None else [(i[:, :, None] == context[:, None]).any(-1) for i in ids]
    if seen is not None and first_token is not None:
        seen[0] = torch.zeros_like(seen[0])  # the token is emitted already: nothing to penalise in it
    order = torch.ones(rows, dtype=torch.int64, device=device)
    joints = {1: joint(probs[:1])}
    for m in range(2, n + 1):
        values = joint(probs[:m])
        if cooccurrence is not None and m in cooccurrence.keys:
            values = apply_mask(values, cooccurrence.mask(ids[:m]), settings.alpha_c)
        threshold = eps ** (m - 1)
        values = adaptive_threshold(values, threshold, settings.blur, settings.adaptive)
        values = penalise_repetition(values, ids[:m], settings.repetition_penalty, seen and seen[:m])
        joints[m] = values
        # The loop runs upwards where Algorithm 1 runs downwards: the largest order that passes wins in both.
        order = torch.where(exceeds(values, threshold), m, order)
    return JointChoice(order, ids, joints)


def next_token(choice: JointChoice, order: int, prefix: Sequence[torch.Tensor]) -> torch.Tensor:
    """The joint's distribution of a token given the tokens before it.

    Args:
        choice: what select returned.
        order: which joint.
        prefix: [rows] indices into the top-k of heads 1..m.

    Returns:
        [rows, k_(m+1)], normalised; all zero where nothing is left.
    """
    values = choice.joints[order]
    rows = torch.arange(len(values), device=values.device)
    values = values[(rows, *prefix)]
    values = values.flatten(2).sum(dim=2) if values.dim() > 2 else values
    return values / values.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)

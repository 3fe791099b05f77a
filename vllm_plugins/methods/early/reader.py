# SPDX-License-Identifier: Apache-2.0
"""Reading drafts at an exit layer: final norm, early head T, and the target's LM head,
across tensor-parallel ranks.

The best tokens are found in each rank's own part of the vocabulary; samples need the
logits of all parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.early.module import EarlyHeads
from vllm_ppd.heads.io import load_tensors
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.sampling import Sampling, draw_rows
from vllm_ppd.kernels.topk import merge_topk, shard_topk
from vllm_ppd.model_patches.exit_norm import kernels_first

if TYPE_CHECKING:
    from vllm_ppd.model_patches.base import Adapter, CutState
    from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
    from vllm_ppd.vllm_plugins.engine.target import LMHead


def early_heads(
    config: DraftingConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> EarlyHeads | None:
    """The early heads of the options, for drafting; None if exits are read without
    heads.

    Raises:
        HeadsError: if the folder cannot be read.
    """
    if config.model is None:
        return None
    heads = EarlyHeads(*load_tensors(config.model, EarlyConfig))
    return heads.requires_grad_(False).to(device=device, dtype=dtype)


class Reading(NamedTuple):
    """Drafts read at an exit, one per row."""

    # [rows] int64; INVALID where the exit's logits are not finite
    token_ids: torch.Tensor
    # [rows] float32, probability of the exit's best token
    confidence: torch.Tensor | None


class EarlyReader:
    """p_theta(t | h) = softmax(E* T norm(h)) at an exit layer (ParaDecode, section
    2.1).

    Without heads T is the identity: the target's own final norm and LM head, as PPD
    reads untrained exits.
    """

    def __init__(
        self,
        adapter: Adapter,
        lm_head: LMHead,
        heads: EarlyHeads | None,
    ) -> None:
        self.adapter = adapter
        self.heads = heads
        self.lm_head = lm_head
        if heads is not None and heads.form == "classifier":
            for name, weight in heads.weights.items():
                heads.weights[name] = nn.Parameter(
                    self.lm_head.shard(weight.data), requires_grad=False
                )

    def greedy(
        self,
        exit_layer: int,
        state: CutState,
        with_confidence: bool,
    ) -> Reading:
        """The exit's best token of each row; overwrites the state."""
        ids, probability = self._best(exit_layer, state, 1, with_confidence)
        return Reading(ids[:, 0], None if probability is None else probability[:, 0])

    def candidates(self, exit_layer: int, state: CutState, k: int) -> torch.Tensor:
        """The exit's k best tokens of each row, best first: [rows, k] int64; overwrites
        the state.
        """
        return self._best(exit_layer, state, k, False)[0].clamp(min=0)

    def sample(
        self,
        exit_layer: int,
        state: CutState,
        sampling: Sampling,
        with_confidence: bool,
    ) -> Reading:
        """A sample of each row's exit distribution; rows at temperature 0 take the best
        token. Overwrites the state.
        """
        hidden, classifier = self._transformed(exit_layer, state)
        logits = self._logits(hidden, classifier, gather=True)
        token_ids = chosen(draw_rows, logits)(logits, sampling)
        if not with_confidence:
            return Reading(token_ids, None)
        # Of the likeliest token, not the drawn one, as for greedy requests.
        best = logits.amax(dim=-1)
        confidence = (best - torch.logsumexp(logits.float(), dim=-1)).exp()
        return Reading(token_ids, confidence)

    def _transformed(
        self,
        exit_layer: int,
        state: CutState,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(States [rows, hidden] that the LM head reads, the classifier that reads them
        in its place, if any).
        """
        with kernels_first():
            hidden = self.adapter.norm(*state)
        if self.heads is not None and self.heads.form == "classifier":
            return hidden, self.heads.weight(exit_layer)
        return hidden if self.heads is None else self.heads(hidden, exit_layer), None

    def _logits(
        self,
        hidden: torch.Tensor,
        classifier: torch.Tensor | None,
        gather: bool,
    ) -> torch.Tensor:
        if classifier is None:
            return self.lm_head.logits(hidden, gather)
        logits = functional.linear(hidden, classifier)
        return self.lm_head.gather(logits) if gather else logits

    def _best(
        self,
        exit_layer: int,
        state: CutState,
        k: int,
        with_probability: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The k best token IDs of the whole vocabulary [rows, k], and their
        probabilities if requested.

        Under tensor parallelism the ranks exchange (value, token id) pairs of their
        shards, not logits.
        """
        hidden, classifier = self._transformed(exit_layer, state)
        lm_head = self.lm_head
        best = shard_topk(
            self._logits(hidden, classifier, gather=False),
            k,
            lm_head.vocab_start,
            lm_head.num_valid,
            with_probability,
        )
        if lm_head.tp_size == 1:
            if not with_probability:
                return best.token_ids, None
            return best.token_ids, (best.values - best.logsumexp[:, None]).exp()
        # float32 is exact for token ids below 2^24, and every backend can exchange it.
        token_ids = best.token_ids.float()
        logsumexp = best.logsumexp[:, None]
        packed = torch.cat([best.values, token_ids, logsumexp], dim=-1)
        parts = lm_head.all_gather(packed).unflatten(-1, (-1, 2 * k + 1))
        values, token_ids, logsumexp = parts.split((k, k, 1), dim=-1)
        logsumexp = logsumexp.squeeze(-1)
        ids, probabilities = merge_topk(values, token_ids, logsumexp, k)
        return ids, probabilities if with_probability else None

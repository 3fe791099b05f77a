# SPDX-License-Identifier: Apache-2.0
"""Reading a draft at an exit layer: final norm, early head T, the target's LM head, across tensor-parallel ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_gather

from vllm_ppd.heads.early import EarlyHeads
from vllm_ppd.kernels.early_topk import merge_topk, shard_topk
from vllm_ppd.kernels.sampling import divisor, draw, drawn_from, is_greedy
from vllm_ppd.model_patches.base import Adapter, CutState
from vllm_ppd.vllm_plugins.lm_head import LMHead


class Reading(NamedTuple):
    """Drafts read at an exit, one a row."""

    token_ids: torch.Tensor  # [rows] int64
    confidence: torch.Tensor | None  # [rows] float32, probability of the exit's best token
    probs: torch.Tensor | None  # [rows, vocabulary] float32: q(x), for sampled drafts

    def rows(self, index: torch.Tensor) -> Reading:
        """The readings at an index."""
        return Reading(*(None if part is None else part[index] for part in self))  # type: ignore[arg-type]

    def replaced(self, index: torch.Tensor, other: Reading) -> Reading:
        """These readings with those at an index taken from another."""
        pairs = zip(self, other, strict=True)
        parts = [None if a is None or b is None else a.index_copy(0, index, b) for a, b in pairs]
        return Reading(*parts)  # type: ignore[arg-type]


class EarlyReader:
    """p_theta(t | h) = softmax(E* T norm(h)) at an exit layer (ParaDecode, section 2.1).

    Without heads T is the identity: the target's own final norm and LM head, as PPD reads untrained exits.
    """

    def __init__(self, adapter: Adapter, lm_head: LMHead, heads: EarlyHeads | None) -> None:
        self.adapter = adapter
        self.heads = heads
        self.lm_head = lm_head
        if heads is not None and heads.form == "classifier":
            for layer, weight in heads.weights.items():
                heads.weights[layer] = nn.Parameter(self.lm_head.shard(weight.data), requires_grad=False)

    def greedy(self, exit_layer: int, state: CutState, with_confidence: bool) -> Reading:
        """The exit's best token of each row; overwrites the state."""
        ids, probability = self._best(exit_layer, state, 1, with_confidence)
        return Reading(ids[:, 0], probability[:, 0] if with_confidence else None, None)

    def candidates(self, exit_layer: int, state: CutState, k: int) -> torch.Tensor:
        """The exit's k best tokens of each row, best first: [rows, k] int64; overwrites the state."""
        return self._best(exit_layer, state, k, with_probability=False)[0]

    def _best(
        self, exit_layer: int, state: CutState, k: int, with_probability: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and their probabilities [rows, k].

        Under tensor parallelism the ranks exchange (value, token id) pairs of their shards, not logits.
        """
        logits = self._logits(exit_layer, state, gather=False)
        best = shard_topk(logits, k, self.lm_head.vocab_start, self.lm_head.num_valid, with_probability)
        if self.lm_head.tp_size == 1:
            return best.token_ids, (best.values - best.logsumexp[:, None]).exp()
        # float32 holds every token id below 2^24 exactly, and is what every backend can exchange.
        packed = torch.cat([best.values, best.token_ids.float(), best.logsumexp[:, None]], dim=-1)
        shards = tensor_model_parallel_all_gather(packed, dim=-1).view(len(packed), -1, 2 * k + 1)
        return merge_topk(shards[:, :, :k], shards[:, :, k : 2 * k].long(), shards[:, :, 2 * k], k)

    def sample(
        self,
        exit_layer: int,
        state: CutState,
        temperature: torch.Tensor,  # [rows]; rows at 0 take the best token
    ) -> Reading:
        """A sample of each row's exit distribution, with the distribution it came from; overwrites the state."""
        return sampled_reading(self._logits(exit_layer, state, gather=True), temperature)

    def together(self, states: list[tuple[int | None, CutState]]) -> torch.Tensor:
        """Logits [rows, vocabulary] of several states, one behind the other, in one read of the LM head.

        Args:
            states: (exit layer, its states), or (None, normed hidden states of the final layer). May be overwritten.
        """
        hidden = [state[0] if layer is None else self._transformed(layer, state) for layer, state in states]
        if self.heads is None or self.heads.form != "classifier":
            return self.lm_head.logits(torch.cat(hidden))
        read = [self.lm_head.logits if layer is None else self.lm_head.gather for layer, _ in states]
        return torch.cat([logits(part) for logits, part in zip(read, hidden, strict=True)])

    def _logits(self, exit_layer: int, state: CutState, gather: bool) -> torch.Tensor:
        hidden = self._transformed(exit_layer, state)
        if self.heads is not None and self.heads.form == "classifier":
            return self.lm_head.gather(hidden) if gather else hidden
        return self.lm_head.logits(hidden, gather)

    def _transformed(self, exit_layer: int, state: CutState) -> torch.Tensor:
        """What the LM head reads (T applied), or a classifier's logits of this rank's shard."""
        hidden = self.adapter.norm(*state)
        return hidden if self.heads is None else self.heads(hidden, exit_layer)


def greedy_reading(logits: torch.Tensor, with_confidence: bool) -> Reading:
    """The best token of each row of logits [rows, vocabulary]."""
    best = logits.float().max(dim=-1)
    confidence = (best.values - torch.logsumexp(logits.float(), dim=-1)).exp() if with_confidence else None
    return Reading(best.indices, confidence, None)


def sampled_reading(logits: torch.Tensor, temperature: torch.Tensor) -> Reading:
    """A sample of each row of logits [rows, vocabulary] at its temperature [rows]; rows at 0 take the best token."""
    logits = logits.float()
    confidence = (logits.max(dim=-1).values - torch.logsumexp(logits, dim=-1)).exp()
    greedy = is_greedy(temperature)
    probs = torch.softmax(logits / divisor(temperature), dim=-1)
    token_ids = torch.where(greedy, logits.argmax(dim=-1), draw(probs))
    return Reading(token_ids, confidence, drawn_from(probs, token_ids, greedy))

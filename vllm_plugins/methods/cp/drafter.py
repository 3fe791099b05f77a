# SPDX-License-Identifier: Apache-2.0
"""CP drafting: the next n tokens from the hidden state that gave the last one, as a mixture of r experts.

    step     the target emits b from its hidden state e
    states   T_a^(s) e of every expert a and position s: one read of the LM head gives all their logits
    chain    b moves the experts' weights, their mixture gives d1, d1 moves the weights, ... (CP heads, section 2.4)

No layer runs and no KV is written: the next step verifies [b, d1..dn] in one forward of the target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.cp.module import log_gate
from vllm_ppd.heads.io import load_tensors
from vllm_ppd.kernels.cp_mixture import draft_chain
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.sampling import INVALID, Sampling, are_distributions, drawn_from, is_greedy
from vllm_ppd.vllm_plugins.drafting.draft_vocabulary import DraftVocabulary
from vllm_ppd.vllm_plugins.drafting.drafter import Drafter, DraftInputs, Drafts

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
    from vllm_ppd.vllm_plugins.integration.target import Target

LOGITS_AT_ONCE = 1 << 26  # numbers


class CPDrafter(Drafter):
    """Drafts with a CP head over the target's last hidden state."""

    def load(self, config: DraftingConfig, target: Target) -> None:
        heads, tensors = load_tensors(str(config.model), CPConfig.kind)
        assert isinstance(heads, CPConfig)
        self.target = target
        self.vocabulary = DraftVocabulary.of(config, heads, tensors, target)
        positions = config.num_speculative_tokens + 1
        if heads.factorised:
            weights = tensors["cp.transforms"][:positions]
        elif self.vocabulary is not None:
            weights = tensors["cp.classifiers"][:positions, :, self.vocabulary.token_ids.cpu()]
        else:
            weights = target.lm_head.shard(tensors["cp.classifiers"][:positions])
        self.gate = tensors["cp.gate"].to(device=target.device, dtype=target.dtype)
        self.weights = target.linear(weights.flatten(0, 2))
        self.factorised, self.rank, self.positions = heads.factorised, heads.rank, positions
        size = config.draft_vocab_size or target.vocab_size
        self.requests_at_once = max(1, LOGITS_AT_ONCE // (positions * heads.rank * size))

    def propose(self, step: DraftInputs) -> Drafts:
        requests = len(step.newest_ids)
        parts = [
            self._draft(step, slice(start, start + self.requests_at_once))
            for start in range(0, requests, self.requests_at_once)
        ]
        tokens = torch.cat([ids for ids, _ in parts])
        return Drafts(tokens, probs=None if step.sampling is None else torch.cat([q for _, q in parts]))

    def _draft(self, step: DraftInputs, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts of some requests, or INVALID [requests, n], and what they were drawn from [requests, n, entries]."""
        hidden, first, vocabulary = step.hidden[part], step.newest_ids[part], self.vocabulary
        sampling = None if step.sampling is None else step.sampling.at(part)
        if vocabulary is not None:
            first = vocabulary.place_of[first]
        logits = self._logits(hidden)
        tokens, q = self.chain(log_gate(hidden, self.gate), logits, first, sampling)
        if sampling is None:
            valid = q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).isfinite()  # NaN in a softmax makes all of it NaN
        else:
            valid = are_distributions(q)
            q = drawn_from(q, tokens, is_greedy(sampling.temperature))
        return torch.where(valid, tokens if vocabulary is None else vocabulary.token_ids[tokens], INVALID), q

    @staticmethod
    def chain(
        log_weights: torch.Tensor, logits: torch.Tensor, first: torch.Tensor, sampling: Sampling | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [requests, n] and what they were drawn from [requests, n, entries]."""
        return chosen(draft_chain, logits)(log_weights, logits, first, sampling)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[requests, n + 1, r, draft vocabulary], the position of the emitted token first."""
        product = self.weights(hidden).view(len(hidden), self.positions, self.rank, -1)
        if self.factorised:
            read = self.target.lm_head.logits if self.vocabulary is None else self.vocabulary.logits
            return read(product.flatten(0, 2)).unflatten(0, product.shape[:3])
        return self.target.lm_head.gather(product) if self.vocabulary is None else product

# SPDX-License-Identifier: Apache-2.0
"""CP drafting: the next n tokens from the hidden state that gave the last one, as a mixture of r experts.

    step     the target emits b from its hidden state e
    states   T_a^(s) e of every expert a and position s: one read of the unembedding gives all their logits
    chain    b moves the experts' weights, their mixture gives d1, d1 moves the weights, ... (CP heads, section 2.4)

No layer runs and no KV is written: the next step verifies [b, d1..dn] as one forward of the target.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_ppd.heads.config import CPConfig
from vllm_ppd.heads.cp.module import log_gate
from vllm_ppd.heads.io import load_tensors
from vllm_ppd.kernels.cp_mixture import draft_chain
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.sampling import INVALID, are_distributions, drawn_from, is_greedy
from vllm_ppd.vllm_plugins.drafting.draft_vocabulary import DraftVocabulary
from vllm_ppd.vllm_plugins.drafting.planner import Plan
from vllm_ppd.vllm_plugins.drafting.proposer import Proposer, Step
from vllm_ppd.vllm_plugins.integration.lm_head import TargetLMHead
from vllm_ppd.vllm_plugins.integration.packed_linear import PackedLinear

LOGITS_AT_ONCE = 1 << 26  # numbers


class CPProposer(Proposer):
    """Drafts with a CP head over the target's last hidden state."""

    def load_model(self, model: Any) -> None:
        config, tensors = load_tensors(str(self.config.model), CPConfig.kind)
        assert isinstance(config, CPConfig)
        device, vllm_config = self.runner.device, self.vllm_config
        self.pad_rows(model)
        self.lm_head = TargetLMHead(model)
        self.vocabulary: DraftVocabulary | None = None
        if self.config.draft_vocab_size is not None:
            counts = tensors[str(config.counts_tensor)]
            self.vocabulary = DraftVocabulary(counts, self.config.draft_vocab_size, self.lm_head, vllm_config, device)
        used = self.config.num_speculative_tokens + 1
        if config.factorised:
            weights = tensors["cp.transforms"][:used]
        elif self.vocabulary is not None:
            weights = tensors["cp.classifiers"][:used, :, self.vocabulary.token_ids.cpu()]
        else:
            weights = self.lm_head.shard(tensors["cp.classifiers"][:used])
        self.gate = tensors["cp.gate"].to(device=device, dtype=vllm_config.model_config.dtype)
        self.weights = PackedLinear(weights.flatten(0, 2), vllm_config, device)
        self.factorised, self.experts = config.factorised, (used, config.rank)
        size = self.config.draft_vocab_size or config.target.vocab_size
        self.requests_at_once = max(1, LOGITS_AT_ONCE // (used * config.rank * size))
        self.allocate_probs()

    def draft_plan(self, plan: Plan, step: Step) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.zeros((len(plan.rows), self.config.num_speculative_tokens), dtype=np.int64)
        drafting = np.flatnonzero(plan.max_drafts)
        for start in range(0, len(drafting), self.requests_at_once):
            some = drafting[start : start + self.requests_at_once]
            tokens[some] = self._draft(plan.rows[some], plan.base_tokens[some], step).cpu().numpy()
        return tokens, plan.max_drafts

    def _draft(self, rows: np.ndarray, first_tokens: np.ndarray, step: Step) -> torch.Tensor:
        """Drafts of some batch rows after the token that each emitted last, or INVALID: [rows, n]."""
        hidden = step.sample_hidden_states[self.index(step.last_rows(rows))]
        temperature = self.temperature(rows, step.sampling)
        first, vocabulary = self.index(first_tokens), self.vocabulary
        if vocabulary is not None:
            first = vocabulary.place_of[first]
        tokens, q = self.chain(log_gate(hidden, self.gate), self._logits(hidden), first, temperature)
        if temperature is None:
            valid = q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).isfinite()  # NaN in a softmax makes all of it NaN
        else:
            valid = are_distributions(q)
        if self.probs is not None and temperature is not None:
            q = drawn_from(q, tokens, is_greedy(temperature))
            index = self.index(rows)
            self.probs[index] = q if vocabulary is None else vocabulary.spread(q, self.probs[index])
        return torch.where(valid, tokens if vocabulary is None else vocabulary.token_ids[tokens], INVALID)

    @staticmethod
    def chain(
        log_weights: torch.Tensor, logits: torch.Tensor, first: torch.Tensor, temperature: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [rows, n] and what they were drawn from [rows, n, vocabulary], by the device's own draft_chain."""
        return chosen(draft_chain, logits)(log_weights, logits, first, temperature)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, n + 1, r, vocabulary], the emitted token's position first."""
        product = self.weights(hidden).view(len(hidden), *self.experts, -1)
        if self.factorised:
            read = self.lm_head.logits if self.vocabulary is None else self.vocabulary.logits
            return read(product.flatten(0, 2)).unflatten(0, product.shape[:3])
        return self.lm_head.gather(product) if self.vocabulary is None else product

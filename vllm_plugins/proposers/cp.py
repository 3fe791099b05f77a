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

from vllm_ppd.heads.checkpoint import load_tensors
from vllm_ppd.heads.config import CPConfig
from vllm_ppd.heads.cp import CPHead
from vllm_ppd.kernels.cp_mixture import GREEDY_BELOW, draft_chain
from vllm_ppd.vllm_plugins.lm_head import TargetLMHead
from vllm_ppd.vllm_plugins.packed_linear import PackedLinear
from vllm_ppd.vllm_plugins.plan import Plan
from vllm_ppd.vllm_plugins.proposers.base import Proposer, Step

LOGITS_AT_ONCE = 1 << 26  # numbers


class CPProposer(Proposer):
    """Drafts with a CP head over the target's last hidden state."""

    def load_model(self, model: Any) -> None:
        config, tensors = load_tensors(str(self.config.model), CPConfig.kind)
        assert isinstance(config, CPConfig)
        self.lm_head = TargetLMHead(model)
        used = self.config.num_speculative_tokens + 1
        for name in ("cp.transforms", "cp.classifiers"):
            if name in tensors:
                tensors[name] = tensors[name][:used]
        if "cp.classifiers" in tensors:
            tensors["cp.classifiers"] = self.lm_head.shard(tensors["cp.classifiers"])
        dtype = self.vllm_config.model_config.dtype
        self.head = CPHead.from_tensors(tensors).requires_grad_(False).to(device=self.runner.device, dtype=dtype)
        self.transforms: PackedLinear | None = None
        if self.head.transforms is not None:
            self.transforms = PackedLinear(self.head.transforms.flatten(0, 2), self.vllm_config, self.runner.device)
            self.head.transforms.data = torch.empty(0)  # packed now; one copy is enough
        self.requests_at_once = max(1, LOGITS_AT_ONCE // (used * config.rank * config.target.vocab_size))
        self.allocate_probs()

    def draft_plan(self, plan: Plan, step: Step) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.zeros((len(plan.rows), self.config.num_speculative_tokens), dtype=np.int64)
        drafting = np.flatnonzero(plan.max_drafts)
        for start in range(0, len(drafting), self.requests_at_once):
            chosen = drafting[start : start + self.requests_at_once]
            tokens[chosen] = self._draft(plan.rows[chosen], plan.base_tokens[chosen], step).cpu().numpy()
        return tokens, plan.max_drafts

    def _draft(self, rows: np.ndarray, first_tokens: np.ndarray, step: Step) -> torch.Tensor:
        """Drafts of some batch rows after the token that each emitted last: [rows, n]."""
        hidden = step.sample_hidden_states[self.index(step.last_rows(rows))]
        temperature = self.temperature(rows, step.sampling)
        tokens, q = draft_chain(
            self.head.log_weights(hidden), self._logits(hidden), self.index(first_tokens), temperature
        )
        if self.probs is not None and temperature is not None:
            one_hot = torch.zeros_like(q).scatter_(2, tokens[..., None], 1.0)
            greedy = (temperature < GREEDY_BELOW)[:, None, None]
            self.probs[self.index(rows)] = torch.where(greedy, one_hot, q)
        return tokens

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, n + 1, r, vocabulary], the emitted token's position first."""
        shape = (self.config.num_speculative_tokens + 1, self.head.rank)
        if self.transforms is None:
            return self.lm_head.gather(self.head.logits(hidden, None))
        states = self.transforms(hidden).view(-1, hidden.shape[-1])
        return self.lm_head.logits(states).unflatten(0, (-1, *shape))

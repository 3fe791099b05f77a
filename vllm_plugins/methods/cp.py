# SPDX-License-Identifier: Apache-2.0
"""CP drafting: the next n tokens from the hidden state that gave the last token, as a
mixture of r experts.

    step     the target emits b from its hidden state e
    states   T_a^(s) e of every expert a and position s: one read of the LM head gives
             all their logits
    chain    b updates the experts' weights, their mixture gives d1, d1 updates the
             weights, ... (CP heads, section 2.4)

With condition recurrent a state reads b and each draft, by the same matrices whatever
the number of drafts (heads/cp/module.py), and W_b E[b] joins the gate in place of
b's update of weights.

No layer runs and no KV is written: the next step verifies [b, d1..dn] in one forward of
the target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.cp.module import Recurrence, draft_in_sequence, log_gate
from vllm_ppd.heads.io import load_tensors
from vllm_ppd.kernels.cp_mixture import draft_chain
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.vllm_plugins.engine.drafter import ChainDrafter, DraftInputs
from vllm_ppd.vllm_plugins.engine.target import DraftVocabulary

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
    from vllm_ppd.vllm_plugins.engine.target import Target

LOGITS_AT_ONCE = 1 << 26  # numbers

# The function that draft_in_sequence takes
ReadLogits = Callable[[int, torch.Tensor | None], torch.Tensor]


class CPDrafter(ChainDrafter):
    """Drafts with a CP head over the target's last hidden state."""

    def load(self, config: DraftingConfig, target: Target) -> None:
        heads, tensors = load_tensors(str(config.model), CPConfig)
        self.target = target
        self.vocabulary = DraftVocabulary.of(config, heads, tensors, target)
        drafts = config.num_speculative_tokens
        self.lead = heads.positions - heads.factors  # positions without factors
        factors = drafts + 1 - self.lead
        self.factorised = heads.factorised
        self.rank = heads.rank
        self.factors = factors
        self.gate = tensors["cp.gate"].to(device=target.device, dtype=target.dtype)
        self.token_gate = tensors["cp.token_gate"].to(self.gate) if self.lead else None
        self.recurrence = None
        if heads.condition == "recurrent":
            placed = dict(tensors)
            if heads.rank > 1:
                up = tensors["cp.recurrence.up"]
                placed["cp.recurrence.up"] = up.to(target.device, target.dtype)
            self.recurrence = Recurrence(placed, target.linear)
        # [layers, tokens of the step, d]
        self.tapped = target.tapped_after(heads.layers) if heads.layers else None
        if self.recurrence is None:
            self._load_matrices(heads, tensors)
        size = config.draft_vocab_size or target.vocab_size
        self.requests_at_once = max(1, LOGITS_AT_ONCE // (factors * heads.rank * size))

    def _load_matrices(self, heads: CPConfig, tensors: dict[str, torch.Tensor]) -> None:
        """Load the matrices of each expert and position."""
        target = self.target
        factors = self.factors
        if heads.factorised:
            weights = tensors["cp.transforms"][:factors]
        elif self.vocabulary is not None:
            weights = tensors["cp.classifiers"][
                :factors, :, self.vocabulary.token_ids.cpu()
            ]
        else:
            weights = target.lm_head.shard(tensors["cp.classifiers"][:factors])
        self.weights = target.linear(weights.flatten(0, 2))

    def drawn(self, step: DraftInputs, part: slice) -> torch.Tensor:
        hidden = step.hidden[part]
        first = step.newest_ids[part]
        vocabulary = self.vocabulary
        sampling = None if step.sampling is None else step.sampling.at(part)
        token_ids = None if vocabulary is None else vocabulary.token_ids
        embedded = self.target.embed(first) if self.lead else None
        log_weights = log_gate(hidden, self.gate, embedded, self.token_gate)
        if self.recurrence is not None:
            assert embedded is not None
            if self.tapped is not None:
                layers = self.tapped[:, step.places[part]]
                hidden = torch.cat([hidden, *layers], dim=-1)
            state = self.recurrence.start(hidden)
            read = self._recurrent(self.recurrence, state, embedded)
            return draft_in_sequence(
                log_weights, self.factors, read, sampling, token_ids
            )
        logits = self._logits(
            self.weights(hidden).view(len(hidden), self.factors, self.rank, -1)
        )
        first_entry = first if vocabulary is None else vocabulary.place_of[first]
        entries, _ = chosen(draft_chain, logits)(
            log_weights, logits, first_entry, sampling, token_ids
        )
        return entries

    def _recurrent(
        self, recurrence: Recurrence, state: torch.Tensor, first: torch.Tensor
    ) -> ReadLogits:
        """A reader of each draft's logits from a state [rows, d], which next reads E of
        the newest token, `first`.
        """

        def read(position: int, before: torch.Tensor | None) -> torch.Tensor:
            nonlocal state
            state = recurrence.advance(
                state, first if before is None else self._embedded(before)
            )
            return self._logits(recurrence.experts(state))

        return read

    def _logits(self, product: torch.Tensor) -> torch.Tensor:
        """Logits [requests, ..., r, draft vocabulary] of the heads' products [requests,
        ..., r, out].
        """
        if self.factorised:
            read = (
                self.target.lm_head.logits
                if self.vocabulary is None
                else self.vocabulary.logits
            )
            return read(product.flatten(0, -2)).unflatten(0, product.shape[:-1])
        bias = self.target.lm_head.bias
        if bias is not None:  # whole classifiers are trained beside it
            product = product + (
                bias if self.vocabulary is None else self.vocabulary.bias
            ).to(product)
        return (
            self.target.lm_head.gather(product) if self.vocabulary is None else product
        )

    def _embedded(self, drafts: torch.Tensor) -> torch.Tensor:
        """E of drafts [requests], entries of the draft vocabulary: [requests, hidden]."""
        return self.target.embed(self.ids(drafts).clamp(min=0))

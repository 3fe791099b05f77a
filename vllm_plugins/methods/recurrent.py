# SPDX-License-Identifier: Apache-2.0
"""Recurrent drafting: a state that starts from the last hidden state and reads the
newest token and each draft.

The heads have their own embeddings and LM heads (heads/recurrent/module.py). No layer
runs, and no KV is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_ppd.heads.cp.module import draft_in_sequence
from vllm_ppd.heads.io import load_tensors
from vllm_ppd.heads.recurrent.config import RecurrentConfig
from vllm_ppd.heads.recurrent.module import Read, Recurrence
from vllm_ppd.vllm_plugins.engine.drafter import ChainDrafter, DraftInputs
from vllm_ppd.vllm_plugins.engine.target import DraftVocabulary

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
    from vllm_ppd.vllm_plugins.engine.target import Target

LOGITS_AT_ONCE = 1 << 26  # numbers


class RecurrentDrafter(ChainDrafter):
    """Drafts with recurrent heads."""

    def load(self, config: DraftingConfig, target: Target) -> None:
        heads, tensors = load_tensors(str(config.model), RecurrentConfig)
        self.target = target
        self.drafts = config.num_speculative_tokens
        self.vocabulary = DraftVocabulary.of(
            config, heads, tensors, target, reads_lm_head=False
        )
        placed = {
            name: tensor.to(target.device, target.dtype)
            if tensor.dim() == 1
            else tensor
            for name, tensor in tensors.items()
            if not heads.is_count(name)
        }
        self.recurrence = Recurrence(
            heads, placed, target.linear, self._embedding, self.drafts
        )
        stages = range(min(heads.stages, self.drafts))
        self.lm_heads = [
            target.linear(self._rows(tensors[f"head.{stage}.weight"]))
            for stage in stages
        ]
        size = config.draft_vocab_size or target.vocab_size
        self.requests_at_once = max(1, LOGITS_AT_ONCE // size)

    def _embedding(self, stage: int, table: torch.Tensor) -> Read:
        """An embedding; later heads with separate tables only read drafts, so tokens of
        the draft vocabulary.
        """
        vocabulary = self.vocabulary
        if vocabulary is None or stage == 0:
            return self.target.embedding(table)
        rows = self.target.embedding(table[vocabulary.token_ids.cpu()])
        return lambda tokens: rows(vocabulary.place_of[tokens].clamp(min=0))

    def _rows(self, lm_head: torch.Tensor) -> torch.Tensor:
        """Rows of an LM head for the draft vocabulary, or for this rank."""
        vocabulary = self.vocabulary
        return (
            self.target.lm_head.shard(lm_head)
            if vocabulary is None
            else lm_head[vocabulary.token_ids.cpu()]
        )

    def drawn(self, step: DraftInputs, part: slice) -> torch.Tensor:
        hidden = step.hidden[part]
        first = step.newest_ids[part]
        sampling = None if step.sampling is None else step.sampling.at(part)
        token_ids = None if self.vocabulary is None else self.vocabulary.token_ids
        state = self.recurrence.start(hidden)

        def read(position: int, before: torch.Tensor | None) -> torch.Tensor:
            nonlocal state
            tokens = first if before is None else self.ids(before).clamp(min=0)
            state = self.recurrence.advance(position, state, tokens)
            logits = self.lm_heads[min(position, len(self.lm_heads) - 1)](state.output)
            return (
                self.target.lm_head.gather(logits)
                if self.vocabulary is None
                else logits
            )[:, None]

        # Log weights of a mixture of a single expert
        alone = hidden.new_zeros(len(hidden), 1, dtype=torch.float32)
        return draft_in_sequence(alone, self.drafts, read, sampling, token_ids)

# SPDX-License-Identifier: Apache-2.0
"""Recurrent drafting: a state that starts from the last hidden state and reads the
newest token and each draft.

The heads have their own embeddings and LM heads (heads/recurrent/module.py). No layer
runs, and no KV is written.
"""

import torch
from torch import Tensor

from vllm_ppd.heads.cp.module import draft_in_sequence
from vllm_ppd.heads.folder import load_tensors
from vllm_ppd.heads.recurrent.config import RecurrentConfig
from vllm_ppd.heads.recurrent.module import Read, Recurrence
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.engine.drafter import Drafter, DraftInputs, Drafts
from vllm_ppd.vllm_plugins.engine.target import DraftVocabulary, Target

LOGITS_AT_ONCE = 1 << 26  # numbers


class RecurrentDrafter(Drafter):
    """Drafts with recurrent heads."""

    vocabulary: DraftVocabulary

    def load(self, config: DraftingConfig, target: Target) -> None:
        heads, tensors = load_tensors(str(config.model), RecurrentConfig)
        self.target = target
        self.drafts = config.num_speculative_tokens
        vocabulary = DraftVocabulary(
            config, heads, tensors, target, reads_lm_head=False
        )
        self.vocabulary = vocabulary
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
        self.lm_heads = [
            vocabulary.classifiers(tensors[f"head.{stage}.weight"])
            for stage in range(min(heads.stages, self.drafts))
        ]
        self.requests_at_once = max(1, LOGITS_AT_ONCE // vocabulary.size)

    def _embedding(self, stage: int, table: Tensor) -> Read:
        """An embedding; later heads with separate tables only read drafts, so tokens of
        the draft vocabulary.
        """
        vocabulary = self.vocabulary
        if vocabulary.token_ids is None or stage == 0:
            return self.target.embedding(table)
        rows = self.target.embedding(table[vocabulary.token_ids.cpu()])
        return lambda tokens: rows(vocabulary.entries(tokens).clamp(min=0))

    def propose(self, step: DraftInputs) -> Drafts:
        vocabulary = self.vocabulary
        state = self.recurrence.start(step.hidden)

        def read(position: int, before: Tensor | None) -> Tensor:
            nonlocal state
            tokens = step.newest_ids
            if before is not None:
                tokens = vocabulary.ids(before).clamp(min=0)
            state = self.recurrence.advance(position, state, tokens)
            lm_head = self.lm_heads[min(position, len(self.lm_heads) - 1)]
            return vocabulary.gather(lm_head(state.output))[:, None]

        # Log weights of a mixture of a single expert
        alone = torch.zeros_like(step.hidden[:, :1], dtype=torch.float32)
        entries = draft_in_sequence(
            alone, self.drafts, read, step.sampling, vocabulary.token_ids
        )
        return Drafts(vocabulary.ids(entries))

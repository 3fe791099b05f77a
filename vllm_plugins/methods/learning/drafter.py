# SPDX-License-Identifier: Apache-2.0
"""Drafting with heads that are learned while the engine runs: a CP head of one expert,
condition recurrent, without a gated layer.

All tensors have their places, and CUDA graphs read them, before anything is learned.
"""

import torch
from torch import Tensor
from torch.nn import functional
from vllm.distributed import get_tp_group

from vllm_ppd.heads.base import TargetLayers
from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.cp.module import Recurrence, draft_in_sequence
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.engine.drafter import Drafter, DraftInputs, Drafts
from vllm_ppd.vllm_plugins.engine.target import DraftVocabulary, Target

DRAFTED = 3072  # most tokens of the draft vocabulary
# Width of the gated layer, which CP heads have and which stays zero; products are
# fastest at multiples of it
WIDTH = 8


def learned_config(config: DraftingConfig, target: Target) -> CPConfig:
    """The configuration of learned heads."""
    model = target.vllm_config.model_config
    drafts = config.num_speculative_tokens
    text = model.hf_text_config
    size = min(DRAFTED, target.vocab_size)
    return CPConfig(
        verifier=model.model,
        num_speculative_tokens=drafts,
        draft_vocab_size=size if size < target.vocab_size else None,
        dtype=str(target.dtype).removeprefix("torch."),
        target=TargetLayers(
            model_type=text.model_type,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_hidden_layers=config.num_layers,
        ),
        positions=drafts + 1,
        rank=1,
        condition="recurrent",
        inner_size=WIDTH,
        token_counts=True,
    )


class LearnedDrafter(Drafter):
    """Drafts with learned heads."""

    vocabulary: DraftVocabulary

    def load(self, config: DraftingConfig, target: Target) -> None:
        self.target = target
        self.drafts = config.num_speculative_tokens
        self.heads = learned_config(config, target)
        self.tensors = {
            name: torch.zeros(shape)
            for name, shape in self.heads.shapes().items()
        }
        size = self.heads.draft_vocab_size
        self.vocabulary = DraftVocabulary(
            config.model_copy(update={"draft_vocab_size": size}),
            self.heads,
            self.tensors,
            target,
        )
        self.recurrence = Recurrence(self.tensors, target.linear)

    def propose(self, step: DraftInputs) -> Drafts:
        vocabulary = self.vocabulary
        state = step.hidden

        def read(position: int, before: Tensor | None) -> Tensor:
            nonlocal state
            tokens = step.newest_ids
            if before is not None:
                tokens = vocabulary.ids(before).clamp(min=0)
            state = self.recurrence.advance(state, self.target.embed(tokens))
            return vocabulary.logits(state)[:, None]

        # Log weights of a mixture of a single expert
        alone = torch.zeros_like(step.hidden[:, :1], dtype=torch.float32)
        entries = draft_in_sequence(
            alone,
            self.drafts,
            read,
            step.sampling,
            vocabulary.token_ids,
        )
        return Drafts(vocabulary.ids(entries))

    def install(self, solution: Tensor) -> None:
        """Draft by a solution, in place.

        Args:
            solution: [2 d, d] float32, of which every rank takes the first rank's.
        """
        get_tp_group().broadcast(solution)
        parts = solution.T.split(self.target.hidden_size, dim=1)
        for name, part in zip(("inner", "token"), parts, strict=True):
            padded = functional.pad(part, (0, 0, 0, 2 * WIDTH))
            weight = padded.to(self.target.dtype)
            getattr(self.recurrence, name).load(weight)

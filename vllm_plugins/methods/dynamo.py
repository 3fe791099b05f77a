# SPDX-License-Identifier: Apache-2.0
"""DynaMo drafting: token heads beside the target's last layer, and as many drafts as
their joint supports.

forward  every scheduled token also runs through the heads' layers, whose KV is in the
         target's own blocks: after a prefix-cache hit, a chunk of a prompt or a
         verified draft the heads' KV is as complete as the target's
select   joint over the heads' top-k given the emitted token, masked, thresholded,
         backed off (Algorithm 1)
draft    the joint's best n-gram, or a sample of it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_ppd.heads.dynamo.config import DynaMoConfig
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.joint import JointChoice, candidates
from vllm_ppd.heads.io import load_tensors
from vllm_ppd.kernels.sampling import divisor
from vllm_ppd.vllm_plugins.engine.drafter import (
    Drafter,
    DraftInputs,
    Drafts,
    FirstStack,
)
from vllm_ppd.vllm_plugins.engine.target import DraftVocabulary

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
    from vllm_ppd.vllm_plugins.engine.target import Target

JOINT_AT_ONCE = 1 << 22  # entries
PENALISED = 64  # latest tokens that the repetition penalty considers


class DynaMoDrafter(Drafter):
    """Drafts with DynaMo token heads; each is one more layer in the target's forward."""

    def load(self, config: DraftingConfig, target: Target) -> None:
        heads, tensors = load_tensors(str(config.model), DynaMoConfig)
        self.target = target
        self.drafts = config.num_speculative_tokens
        self.states = target.with_token_heads(
            [  # [heads, tokens of the step, hidden]
                {name: tensors[f"head.{token}.{name}"] for name in heads.layer_tensors}
                for token in range(2, self.drafts + 2)
            ]
        )
        counts = CoOccurrence.from_tensors(tensors)
        self.ngrams = None if counts is None else counts.ngrams.to(target.device)
        changes = {} if config.eps_b is None else {"eps_b": config.eps_b}
        self.settings = heads.sampling.model_copy(update=changes)
        self.context_tokens = PENALISED if heads.sampling.repetition_penalty > 1 else 0
        self.vocabulary = DraftVocabulary.of(config, heads, tensors, target)

    def propose(self, step: DraftInputs, first_stack: FirstStack | None) -> Drafts:
        parts = [
            self._draft(step, part)
            for part in self.parts(len(step.newest_ids), self.drafts)
        ]
        counts, tokens = (
            parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        )
        return Drafts(tokens[:, : step.num_drafts], counts)

    def _draft(
        self, step: DraftInputs, part: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(How many to use [requests], drafts [requests, n]).

        A joint that is not finite drafts nothing; a draft whose distribution is not
        finite is INVALID.
        """
        logits = self.logits(step.places[part], self.vocabulary)
        sampling = None if step.sampling is None else step.sampling.at(part)
        scores = logits if sampling is None else logits / divisor(sampling.temperature)
        context = None if step.context is None else step.context[part]
        eps_b = step.options["eps_b"][part]
        choice = self.choose(
            scores,
            step.newest_ids[part],
            eps_b,
            context,
            with_joints=sampling is not None,
        )
        tokens = choice.likeliest.tokens if sampling is None else choice.draw(sampling)
        return choice.likeliest.drafts, tokens[:, 1:]

    def parts(self, requests: int, free: int) -> list[slice]:
        """Slices of requests whose joints over a number of free tokens fit memory."""
        at_once = max(1, JOINT_AT_ONCE // self.settings.k**free)
        return [slice(start, start + at_once) for start in range(0, requests, at_once)]

    def logits(
        self, places: torch.Tensor, vocabulary: DraftVocabulary | None = None
    ) -> torch.Tensor:
        """Logits of the heads from 2 on, [n - 1, requests, vocabulary] float32, in one
        read of the LM head.
        """
        states = self.states[:, places]
        read = self.target.lm_head.logits if vocabulary is None else vocabulary.logits
        return read(states.flatten(0, 1)).float().unflatten(0, states.shape[:2])

    def choose(
        self,
        scores: list[torch.Tensor] | torch.Tensor,  # as for candidates
        first_token: torch.Tensor
        | None,  # [requests] the emitted token; None: head 1 chooses it
        eps_b: torch.Tensor,  # [requests] the requests' thresholds, NaN if unset
        context: torch.Tensor
        | None,  # [requests, tokens] latest tokens, for the repetition penalty
        with_joints: bool = True,  # as for candidates
    ) -> JointChoice:
        """Algorithm 1."""
        tokens = None if self.vocabulary is None else self.vocabulary.token_ids
        joint = candidates(
            scores, self.settings, self.ngrams, first_token, tokens, with_joints
        )
        return joint.back_off(self.settings, eps_b, context)

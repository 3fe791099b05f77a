# SPDX-License-Identifier: Apache-2.0
"""DynaMo drafting: token heads beside the target's last layer, and as many drafts as their joint is sure of.

forward  every scheduled token runs through the heads' layers too, whose KV stands in the target's own blocks: after
         a prefix-cache hit, a chunk of a prompt or a verified draft the heads' KV is as complete as the target's
select   joint over the heads' top-k given the emitted token, masked, thresholded, backed off (Algorithm 1)
draft    the joint's best n-gram, or a sample of it with its conditionals as q(x)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_ppd.heads.dynamo.config import DynaMoConfig
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.joint import JointChoice, select
from vllm_ppd.heads.io import load_tensors
from vllm_ppd.kernels.sampling import INVALID, Sampling, are_distributions, divisor
from vllm_ppd.vllm_plugins.engine.draft_vocabulary import DraftVocabulary
from vllm_ppd.vllm_plugins.engine.drafter import Drafter, DraftInputs, Drafts

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
    from vllm_ppd.vllm_plugins.engine.target import Target

JOINT_AT_ONCE = 1 << 22  # entries
PENALISED = 64  # tokens that the repetition penalty looks back


class DynaMoDrafter(Drafter):
    """Drafts with DynaMo token heads; each is one more layer in the target's forward."""

    def load(self, config: DraftingConfig, target: Target) -> None:
        heads, tensors = load_tensors(str(config.model), DynaMoConfig)
        self.target, self.drafts = target, config.num_speculative_tokens
        self.states = target.with_token_heads([  # [heads, tokens of the step, hidden]
            {name: tensors[f"head.{token}.{name}"] for name in heads.layer_tensors}
            for token in range(2, self.drafts + 2)
        ])  # fmt: skip
        counts = CoOccurrence.from_tensors(tensors)
        self.counts = None if counts is None else counts.to(target.device)
        self.settings = heads.sampling
        self.eps_b = heads.sampling.eps_b if config.eps_b is None else config.eps_b
        self.context_tokens = PENALISED if heads.sampling.repetition_penalty > 1 else 0
        self.vocabulary = DraftVocabulary.of(config, heads, tensors, target)

    def propose(self, step: DraftInputs) -> Drafts:
        parts = [self._draft(step, part) for part in self.parts(len(step.newest_ids), self.drafts)]
        joined = [None if tensors[0] is None else torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        counts, *by_draft = joined
        tokens, probs, confidence = (None if tensors is None else tensors[:, : step.num_drafts] for tensors in by_draft)
        assert tokens is not None
        return Drafts(tokens, counts, probs, confidence)

    def _draft(self, step: DraftInputs, part: slice) -> tuple[Any, ...]:
        """(How many to use [requests], drafts [requests, n], q(x) [requests, n, vocabulary], confidence [requests, n]).

        The last two are None where drafts are greedy, and where confidence is not asked for.
        """
        logits = self.logits(step.places[part], self.vocabulary)
        sampling = None if step.sampling is None else step.sampling.at(part)
        scores = logits if sampling is None else logits / divisor(sampling.temperature)
        context = None if step.context is None else step.context[part]
        choice = self.choose(scores, step.newest_ids[part], step.options["eps_b"][part], context)
        # A joint that is not finite drafts nothing; said of one draft, it is dropped as INVALID.
        counts = torch.where(choice.finite, choice.order - 1, 1)
        tokens, q = (choice.best(), None) if sampling is None else self._drawn(choice, sampling)
        tokens[:, 1].masked_fill_(~choice.finite, INVALID)
        confidence = choice.confidence(tokens) if step.with_confidence else None
        return counts, tokens[:, 1:], q, confidence

    def _drawn(self, choice: JointChoice, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
        """A sampled n-gram of each request [requests, n], and what each draft was drawn from, over all tokens."""
        tokens, distributions = choice.draw(sampling)
        whole = torch.zeros(len(tokens), len(distributions), self.target.vocab_size, device=tokens.device)
        for place, (ids, q) in enumerate(zip(choice.token_ids[1:], distributions, strict=True)):
            whole[:, place].scatter_(1, ids, q)
            tokens[:, place + 1].masked_fill_(~are_distributions(q), INVALID)  # also past the order, where -1 stands
        return tokens, whole

    def parts(self, requests: int, free: int) -> list[slice]:
        """Requests in parts whose joints, of so many free tokens, fit memory."""
        at_once = max(1, JOINT_AT_ONCE // self.settings.k**free)
        return [slice(start, start + at_once) for start in range(0, requests, at_once)]

    def logits(self, places: torch.Tensor, vocabulary: DraftVocabulary | None = None) -> torch.Tensor:
        """Of the heads from 2 on, [n - 1, requests, vocabulary] float32: one read of the LM head for all."""
        states = self.states[:, places]
        read = self.target.lm_head.logits if vocabulary is None else vocabulary.logits
        return read(states.flatten(0, 1)).float().unflatten(0, states.shape[:2])

    def choose(
        self,
        scores: list[torch.Tensor] | torch.Tensor,  # as select takes them
        first_token: torch.Tensor | None,  # [requests] the token that is emitted already; None: head 1 chooses it, too
        eps_b: torch.Tensor,  # [requests] each one's own threshold, NaN where it has none
        context: torch.Tensor | None,  # [requests, tokens] the latest ones, for the repetition penalty
    ) -> JointChoice:
        """Algorithm 1."""
        eps = torch.where(eps_b.isnan(), self.eps_b, eps_b)
        tokens = None if self.vocabulary is None else self.vocabulary.token_ids
        return select(scores, self.settings, self.counts, first_token, eps, context, tokens)

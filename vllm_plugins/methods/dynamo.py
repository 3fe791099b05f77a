# SPDX-License-Identifier: Apache-2.0
"""DynaMo drafting: token heads beside the target's last layer, and as many drafts as
their joint supports.

forward  every scheduled token also runs through the heads' layers, whose KV is in the
         target's own blocks: after a prefix-cache hit, a chunk of a prompt or a
         verified draft the heads' KV is as complete as the target's
select   joint over the heads' top-k given the emitted token, masked by what was
         counted and by what was learned, thresholded, backed off (Algorithm 1)
draft    the joint's best n-gram, or a sample of it
"""

import torch

from vllm_ppd.heads.dynamo.config import DynaMoConfig
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.joint import candidates
from vllm_ppd.heads.dynamo.mask import LearnedMask, PairTables
from vllm_ppd.heads.folder import load_tensors
from vllm_ppd.kernels.sampling import divisor
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.engine.drafter import Drafter, DraftInputs, Drafts
from vllm_ppd.vllm_plugins.engine.target import DraftVocabulary, Target

JOINT_AT_ONCE = 1 << 22  # entries


class DynaMoDrafter(Drafter):
    """Drafts with DynaMo token heads; each is one more layer in the target's forward."""

    vocabulary: DraftVocabulary

    def load(self, config: DraftingConfig, target: Target) -> None:
        heads, tensors = load_tensors(str(config.model), DynaMoConfig)
        drafts = config.num_speculative_tokens
        weights = [
            {
                name: tensors[f"head.{token}.{name}"]
                for name in heads.layer_tensors
            }
            for token in range(2, drafts + 2)
        ]
        # [heads, tokens of the step, hidden]
        self.states = target.with_token_heads(weights)
        counts = CoOccurrence.from_tensors(tensors)
        self.ngrams = None if counts is None else counts.ngrams.to(target.device)
        self.k = heads.sampling.k
        self.vocabulary = DraftVocabulary(config, heads, tensors, target)
        self.target = target
        mask = LearnedMask(tensors).requires_grad_(False)
        self.mask = mask.to(target.device, target.dtype)
        self.tables = self.read_tables()
        self.requests_at_once = max(1, JOINT_AT_ONCE // self.k**drafts)

    def read_tables(self) -> PairTables | None:
        """The mask's tables of the target's current weights."""
        vocabulary = self.vocabulary
        token_ids = vocabulary.token_ids
        if token_ids is None:
            token_ids = torch.arange(vocabulary.size, device=self.target.device)
        return self.mask.tables(token_ids, self.target.embed, vocabulary.logits)

    def refresh(self) -> None:
        super().refresh()
        fresh = self.read_tables() or ()
        for table, values in zip(self.tables or (), fresh, strict=True):
            table.copy_(values)

    def propose(self, step: DraftInputs) -> Drafts:
        """Algorithm 1.

        A joint that is not finite drafts nothing; a draft whose distribution is not
        finite is INVALID.
        """
        vocabulary = self.vocabulary
        states = self.states[:, step.places]
        if self.mask.weights:
            newest = self.target.embed(step.newest_ids)
            states = self.mask.masked(states, newest)
        # One read of the LM head
        logits = vocabulary.logits(states.flatten(0, 1)).float()
        scores = logits.unflatten(0, states.shape[:2])
        sampling = step.sampling
        joint = candidates(
            scores,
            self.k,
            self.ngrams,
            step.newest_ids,
            vocabulary.token_ids,
            with_joints=sampling is not None,
            tables=self.tables,
            heat=sampling and divisor(sampling.temperature),
        )
        choice = joint.back_off(step.eps_b)
        likeliest = choice.likeliest
        tokens = likeliest.tokens if sampling is None else choice.draw(sampling)
        return Drafts(tokens[:, 1:], likeliest.drafts)

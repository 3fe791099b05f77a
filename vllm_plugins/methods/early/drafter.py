# SPDX-License-Identifier: Apache-2.0
"""Early drafting (PPD, ParaDecode): drafts are read at an exit layer, one after the
other.

    shallow   layers before the exit on b, read it -> d1; the same layers on d1, read ->
              d2; ...; the same layers on dn
    deep      in the next step: layers behind the exit over [b, d1..dn] from the kept
              states -> logits, and the deep KV of all

Each deep weight is read once for n + 1 tokens and no shallow work is done twice: n *
l/L + 1 full passes per cycle.

A reading is final norm, early head T, and the target's LM head, or its rows of a draft
vocabulary, which tensor-parallel ranks need not join.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.early.module import EarlyHeads
from vllm_ppd.heads.folder import load_tensors
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.sampling import INVALID, Sampling, draw_rows
from vllm_ppd.model_patches.adapters import kernels_first
from vllm_ppd.model_patches.base import Adapter, CutState
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.engine.drafter import Drafter, DraftInputs, Drafts
from vllm_ppd.vllm_plugins.engine.target import (
    CopiedLMHead,
    DraftVocabulary,
    Target,
)
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import DeferredKVCut


def early_heads(
    config: DraftingConfig, device: torch.device, dtype: torch.dtype
) -> tuple[EarlyHeads | None, dict[str, Tensor]]:
    """The early heads of the options, for drafting, and all tensors of their folder;
    neither if exits are read without heads.

    Raises:
        HeadsError: if the folder cannot be read.
    """
    if config.model is None:
        return None, {}
    heads_config, tensors = load_tensors(config.model, EarlyConfig)
    heads = EarlyHeads(heads_config, tensors).requires_grad_(False)
    return heads.to(device=device, dtype=dtype), tensors


class EarlyReader:
    """p_theta(t | h) = softmax(E* T norm(h)) at an exit layer (ParaDecode, section
    2.1).

    Without heads T is the identity: the target's own final norm and LM head, as PPD
    reads untrained exits.
    """

    def __init__(
        self,
        adapter: Adapter,
        lm_head: DraftVocabulary | CopiedLMHead,
        heads: EarlyHeads | None,
    ) -> None:
        self.adapter = adapter
        self.heads = heads
        self.lm_head = lm_head
        if heads is not None and heads.form == "classifier":
            for name, weight in heads.weights.items():
                heads.weights[name] = nn.Parameter(
                    self.lm_head.shard(weight.data), requires_grad=False
                )

    def read(
        self,
        exit_layer: int,
        state: CutState,
        sampling: Sampling | None,
        with_confidence: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The exit's best token of each row, or a sample of each row's distribution, of
        which rows at temperature 0 take the best token. Overwrites the state.

        Returns:
            (entries of the LM head [rows] int64, which are token IDs unless it is that
            of a draft vocabulary, INVALID where the exit's logits are not finite;
            probabilities of the exit's best tokens [rows] float32 if requested).
        """
        logits = self._logits(exit_layer, state)
        peak, entries = logits.max(dim=-1)
        if sampling is None:
            # NaN, and so unequal to 0, where a peak is not finite; isfinite is four
            # kernels.
            entries = entries.masked_fill(peak - peak != 0, INVALID)
        else:
            token_ids = self.lm_head.token_ids
            entries = chosen(draw_rows, logits)(logits, sampling, token_ids)
        confidence = None
        if with_confidence:
            # Of the likeliest token, not the drawn one
            confidence = (peak - torch.logsumexp(logits.float(), dim=-1)).exp()
        return entries, confidence

    def candidates(self, exit_layer: int, state: CutState, k: int) -> Tensor:
        """The exit's k best tokens of each row, best first: [rows, k] int64; overwrites
        the state.
        """
        return self._logits(exit_layer, state).topk(k, dim=-1).indices

    def _logits(self, exit_layer: int, state: CutState) -> Tensor:
        """The exit's logits: [rows, vocabulary]."""
        with kernels_first():
            hidden = self.adapter.norm(*state)
        if self.heads is None:
            return self.lm_head.logits(hidden)
        read: Tensor = self.heads(hidden, exit_layer)
        if self.heads.form == "transform":
            return self.lm_head.logits(read)
        return self.lm_head.gather(read)


class EarlyExitDrafter(Drafter):
    """Drafts at one exit layer a step; a request stops at a draft whose confidence is not
    above gamma (ParaDecode, eq. 1).
    """

    vocabulary: DraftVocabulary

    def load(self, config: DraftingConfig, target: Target) -> None:
        self.gamma = config.gamma
        self.cut = target.cut_after(config.exits, DeferredKVCut)
        heads, tensors = early_heads(config, target.device, target.dtype)
        self.vocabulary = DraftVocabulary(
            config,
            heads and heads.config,
            tensors,
            target,
            reads_lm_head=heads is None or heads.form == "transform",
        )
        self.reader = EarlyReader(self.cut.adapter, self.vocabulary, heads)

    def propose(self, step: DraftInputs) -> Drafts:
        token_ids = step.newest_ids
        drafts = []
        confidences: list[Any] = []
        exit_layer = self.cut.exit_layers[self.cut.exit]
        looked_up = step.looked_up
        with_confidence = self.gamma > 0
        for offset in range(step.num_drafts):
            state = self.cut.passes.run(offset, token_ids)
            sampling = step.sampling and step.sampling.ahead(offset)
            token_ids, confidence = self.reader.read(
                exit_layer, state, sampling, with_confidence
            )
            token_ids = self.vocabulary.ids(token_ids)
            drafts.append(token_ids)
            confidences.append(confidence)
            if looked_up is not None:
                if offset == 0:
                    taken = looked_up.taken(token_ids)
                token_ids = torch.where(
                    taken, looked_up.token_ids[:, offset], token_ids
                )
        # For the last draft's state, from which the deep pass starts
        self.cut.passes.run(step.num_drafts, token_ids)
        tokens = torch.stack(drafts, dim=1)
        if not with_confidence:
            return Drafts(tokens)
        # NaN passes here, as its draft is INVALID.
        confident = ~(torch.stack(confidences, dim=1) <= self.gamma)
        counts = confident.cumprod(dim=1).sum(dim=1)
        return Drafts(tokens, counts)

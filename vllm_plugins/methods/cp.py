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

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_ppd.heads.base import TargetLayers
from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.cp.module import Recurrence, draft_in_sequence, log_gate
from vllm_ppd.heads.folder import load_tensors
from vllm_ppd.kernels.cp_mixture import draft_chain
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.engine.drafter import Drafter, DraftInputs, Drafts
from vllm_ppd.vllm_plugins.engine.target import DraftVocabulary, Target

LOGITS_AT_ONCE = 1 << 26  # numbers
# Width of the gated layer of learned heads; products are fastest at multiples of it
WIDTH = 8


class ParallelRecurrence(Recurrence):
    """A recurrence that tensor-parallel ranks divide.

    Each holds a part of the rows of V, of W_g and of W_i, and the columns of W_o that
    read its gated layer. One all-reduce per token joins V u and W_o (...).
    """

    def __init__(self, tensors: Mapping[str, Tensor], target: Target) -> None:
        own = dict(tensors)
        outer = tensors["cp.recurrence.outer"]
        own["cp.recurrence.outer"] = target.part(outer, 1)
        size, inner = outer.shape
        for name in ("cp.recurrence.token", "cp.recurrence.inner"):
            blocks = tensors[name].split([size, inner, inner])
            own[name] = torch.cat([target.part(block) for block in blocks])
        super().__init__(own, target.linear_of_rank)
        if self.fuse is not None:
            self.fuse = target.linear(tensors["cp.recurrence.fuse"])
        self.target = target

    def joined(self, skip: Tensor, gated: Tensor) -> Tensor:
        self.target.part(gated, 1).add_(skip)
        return self.target.all_reduce(gated)


class CPDrafter(Drafter):
    """Drafts with a CP head over the target's last hidden state."""

    vocabulary: DraftVocabulary

    def load(self, config: DraftingConfig, target: Target) -> None:
        self.target = target
        heads, tensors = self.read(config)
        self.vocabulary = DraftVocabulary(config, heads, tensors, target)
        # Positions that the experts predict: without the token that they read
        self.factors = config.num_speculative_tokens + 1
        self.factorized = heads.factorized
        self.rank = heads.rank
        self.gate = tensors["cp.gate"].to(
            device=target.device, dtype=target.dtype
        )
        self.token_gate: Tensor | None = None
        if heads.condition == "recurrent":
            self.factors -= 1
            self.token_gate = tensors["cp.token_gate"].to(self.gate)
            placed = dict(tensors)
            if heads.rank > 1:
                up = tensors["cp.recurrence.up"]
                placed["cp.recurrence.up"] = up.to(target.device, target.dtype)
            names = ("token", "inner", "outer")
            parts = [tensors[f"cp.recurrence.{name}"] for name in names]
            # The ranks divide it if that pays
            self.recurrence = (
                ParallelRecurrence(placed, target)
                if target.divides(parts, *parts[-1].shape)
                else Recurrence(placed, target.linear)
            )
        elif heads.factorized:
            transforms = tensors["cp.transforms"][: self.factors]
            self.weights = target.linear(transforms.flatten(0, 2))
        else:
            classifiers = tensors["cp.classifiers"][: self.factors]
            self.weights = self.vocabulary.classifiers(classifiers)
        # [layers, tokens of the step, d]
        self.tapped = target.tapped_after(heads.layers) if heads.layers else None
        logits = self.factors * heads.rank * self.vocabulary.size
        self.requests_at_once = max(1, LOGITS_AT_ONCE // logits)

    def read(self, config: DraftingConfig) -> tuple[CPConfig, dict[str, Tensor]]:
        """The heads' configuration and tensors."""
        return load_tensors(str(config.model), CPConfig)

    def propose(self, step: DraftInputs) -> Drafts:
        vocabulary = self.vocabulary
        hidden = step.hidden
        if self.token_gate is None:
            shape = (len(hidden), self.factors, self.rank, -1)
            logits = self._logits(self.weights(hidden).view(shape))
            entries, _ = chosen(draft_chain, logits)(
                log_gate(hidden, self.gate),
                logits,
                vocabulary.entries(step.newest_ids),
                step.sampling,
                vocabulary.token_ids,
            )
        else:
            newest = self.target.embed(step.newest_ids)
            log_weights = log_gate(hidden, self.gate, newest, self.token_gate)
            if self.tapped is not None:
                layers = self.tapped[:, step.places]
                hidden = torch.cat([hidden, *layers], dim=-1)
            state = self.recurrence.start(hidden)

            def read(position: int, before: Tensor | None) -> Tensor:
                nonlocal state
                embedded = newest
                if before is not None:
                    draft = vocabulary.ids(before).clamp(min=0)
                    embedded = self.target.embed(draft)
                state = self.recurrence.advance(state, embedded)
                return self._logits(self.recurrence.experts(state))

            entries = draft_in_sequence(
                log_weights,
                self.factors,
                read,
                step.sampling,
                vocabulary.token_ids,
            )
        return Drafts(vocabulary.ids(entries))

    def _logits(self, product: Tensor) -> Tensor:
        """Logits [requests, ..., r, draft vocabulary] of the heads' products [requests,
        ..., r, out].
        """
        vocabulary = self.vocabulary
        if self.factorized:
            logits = vocabulary.logits(product.flatten(0, -2))
            return logits.unflatten(0, product.shape[:-1])
        if vocabulary.bias is not None:  # whole classifiers are trained beside it
            product = product + vocabulary.bias.to(product)
        return vocabulary.gather(product)


class LearnedDrafter(CPDrafter):
    """Drafts with heads that are learned while the engine runs: one expert, condition
    recurrent, and a gated layer that stays zero.

    All tensors have their places, and CUDA graphs read them, before anything is learned.
    """

    def load(self, config: DraftingConfig, target: Target) -> None:
        super().load(config, target)
        # The ranks divide a matrix by its rows, or not at all
        self.recurrence = Recurrence(self.tensors, target.linear)

    def read(self, config: DraftingConfig) -> tuple[CPConfig, dict[str, Tensor]]:
        target = self.target
        model = target.vllm_config.model_config
        drafts = config.num_speculative_tokens
        fields: dict[str, Any] = {
            "verifier": model.model,
            "num_speculative_tokens": drafts,
            "draft_vocab_size": config.draft_vocab_size,
            "dtype": str(target.dtype).removeprefix("torch."),
            "target": TargetLayers(
                model_type=model.hf_text_config.model_type,
                hidden_size=target.hidden_size,
                vocab_size=target.vocab_size,
                num_hidden_layers=config.num_layers,
            ),
            "positions": drafts + 1,
            "rank": 1,
            "condition": "recurrent",
            "inner_size": WIDTH,
            "token_counts": True,
        }
        self.heads = CPConfig(**fields)
        shapes = self.heads.shapes()
        zeros = partial(torch.zeros, dtype=target.dtype, device=target.device)
        self.tensors = {name: zeros(shapes[name]) for name in shapes}
        return self.heads, self.tensors

    def install(self, solution: Tensor) -> None:
        """Draft by a solution, in place.

        Args:
            solution: [2 d, d], what is added to a state: a product with its own
                RMSNorm and with that of a token's embedding.
        """
        parts = solution.T.split(self.target.hidden_size, dim=1)
        for name, part in zip(("inner", "token"), parts, strict=True):
            matrix = self.tensors[f"cp.recurrence.{name}"]
            matrix[: len(part)] = part
            getattr(self.recurrence, name).load(matrix)

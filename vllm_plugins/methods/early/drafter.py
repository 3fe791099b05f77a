# SPDX-License-Identifier: Apache-2.0
"""Early drafting (PPD, ParaDecode): drafts are read at an exit layer, one after the
other.

    shallow   layers before the exit on b, read it -> d1; the same layers on d1, read ->
              d2; ...; the same layers on dn
    deep      in the next step: layers behind the exit over [b, d1..dn] from the kept
              states -> logits, and the deep KV of all

Each deep weight is read once for n + 1 tokens and no shallow work is done twice: n *
l/L + 1 full passes per cycle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_ppd.vllm_plugins.engine.drafter import Drafter, DraftInputs, Drafts
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import DeferredKVCut
from vllm_ppd.vllm_plugins.methods.early.reader import EarlyReader, early_heads

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
    from vllm_ppd.vllm_plugins.engine.target import Target


class EarlyExitDrafter(Drafter):
    """Drafts at one exit layer a step; a request stops at a draft whose confidence is not
    above gamma (ParaDecode, eq. 1).
    """

    def load(self, config: DraftingConfig, target: Target) -> None:
        self.gamma = config.gamma
        self.cut = target.cut_after(config.exits, DeferredKVCut)
        heads = early_heads(config, target.device, target.dtype)
        self.reader = EarlyReader(self.cut.adapter, target.lm_head, heads)

    def propose(self, step: DraftInputs) -> Drafts:
        token_ids = step.newest_ids
        readings = []
        exit_layer = self.cut.exit_layers[self.cut.exit]
        looked_up = step.looked_up
        with_confidence = self.gamma > 0
        for offset in range(step.num_drafts):
            state = self.cut.run(offset, token_ids)
            sampling = step.sampling and step.sampling.ahead(offset)
            reading = self.reader.read(
                exit_layer,
                state,
                sampling,
                with_confidence,
            )
            readings.append(reading)
            token_ids = reading.token_ids
            if looked_up is not None:
                if offset == 0:
                    taken = looked_up.taken(token_ids)
                token_ids = torch.where(
                    taken, looked_up.token_ids[:, offset], token_ids
                )
        # For the last draft's state, from which the deep pass starts
        self.cut.run(step.num_drafts, token_ids)
        tokens = torch.stack([reading.token_ids for reading in readings], dim=1)
        if not with_confidence:
            return Drafts(tokens)
        confidences = [reading.confidence for reading in readings]
        confidence = torch.stack(confidences, dim=1)  # type: ignore[arg-type]
        # NaN passes here, as its draft is INVALID.
        confident = ~(confidence <= self.gamma)
        counts = confident.cumprod(dim=1).sum(dim=1)
        return Drafts(tokens, counts)

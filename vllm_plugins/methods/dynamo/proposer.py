# SPDX-License-Identifier: Apache-2.0
"""DynaMo's token heads on the V1 runner: their layers run beside the target's, or are skipped; see drafter.py.

Steps that neither compute prompts nor lead to drafts skip the layers (methods/dynamo/missing_kv.py). With verify false
n-grams are emitted as they are sampled (unverified.py).
"""

from typing import Any

import numpy as np
import torch

from vllm_ppd.model_patches.branched import BranchedModel
from vllm_ppd.vllm_plugins.engine.v1.batch import Step
from vllm_ppd.vllm_plugins.engine.v1.proposer import Proposer
from vllm_ppd.vllm_plugins.methods.dynamo.drafter import DynaMoDrafter
from vllm_ppd.vllm_plugins.methods.dynamo.missing_kv import MissingKV
from vllm_ppd.vllm_plugins.methods.dynamo.unverified import NGramEmission


class DynaMoProposer(Proposer):
    """Decides in which steps the draft layers run."""

    emission: NGramEmission | None = None
    missing_kv: MissingKV | None = None  # None: no step skips the draft layers

    def load_model(self, model: Any) -> None:
        super().load_model(model)
        drafter, cut, config = self.host.drafter, self.host.target.cut, self.config
        assert isinstance(drafter, DynaMoDrafter) and isinstance(cut, BranchedModel)
        self.cut = cut
        if not config.verify:
            self.emission = NGramEmission(self, drafter)
        elif config.adaptive or config.disable_by_batch_size is not None:
            self.missing_kv = MissingKV(self.runner, config.num_layers)

    def forward(self, input_ids: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor | None:
        if self.missing_kv is not None:
            skip = self._skips_draft_layers(self.missing_kv)
            self.cut.skip_branches = skip
            self.missing_kv.begin_step(skip)
            self.counters.add("skipped_draft_layer_steps", skip)
        return None

    def _skips_draft_layers(self, missing_kv: MissingKV) -> bool:
        """Whether no request can draft after the coming step, and it computes no prompt.

        Prompts, and tokens that a preempted request computes again, always run through the draft layers: requests may
        draft, and their blocks may be other requests' prefixes.
        """
        batch, most = self.batch, self.config.disable_by_batch_size
        crowded = most is not None and batch.num_requests > most
        if not (crowded or self.drafting_off or missing_kv.everywhere()):
            return False
        return bool((batch.computed >= np.maximum(batch.prompt_lengths, batch.lengths - 1)).all())

    def begin_step(self, scheduler_output: Any) -> None:
        if self.missing_kv is not None:
            self.missing_kv.update_requests(scheduler_output)
        super().begin_step(scheduler_output)

    def drafting_rows(self) -> np.ndarray | None:
        """The rows whose tokens all have KV in the draft layers."""
        return None if self.missing_kv is None else self.missing_kv.complete()

    def after_sampling(self, logits: torch.Tensor | None, sample: Any) -> Any:
        return sample() if self.emission is None else self.emission.emit(logits, sample)

    def draft(self, step: Step) -> list[list[int]]:
        return super().draft(step) if self.emission is None else [[] for _ in step.sampled_token_ids]

# SPDX-License-Identifier: Apache-2.0
"""Options resolved for a target, its heads and the pipeline stages."""

from typing import Any

from pydantic import Field

from vllm_ppd.heads.base import LARGEST_BATCH
from vllm_ppd.vllm_plugins.config.options import DraftingOptions
from vllm_ppd.vllm_plugins.method_spec import ENGINE, MethodSpec
from vllm_ppd.vllm_plugins.registry import METHODS

PARTITION = "VLLM_PP_LAYER_PARTITION"  # vLLM's variable for layers per stage
WORKER = f"{ENGINE}.v2.worker.DraftingWorker"


class DraftingConfig(DraftingOptions):
    """Options resolved for a target: exit layers are known and within the model (None: not used)."""

    num_layers: int
    stages: int = 1  # pipeline stages; with 2 the method is a worker group
    cuts: bool = False  # whether the target is cut, by the method or for heads that read states within it
    heads_summary: str = ""
    drafts_by_batch_size: list[list[int]] = Field(default_factory=list)  # by the heads' calibration

    @property
    def spec(self) -> MethodSpec:
        """The method's record."""
        return METHODS[self.method]

    @property
    def worker(self) -> str:
        """Dotted path of the worker that vLLM starts."""
        group = self.spec.group if self.stages > 1 else None
        return WORKER if group is None else group.worker

    def choice_of_drafts(self) -> dict[str, Any]:
        """vLLM's options for its choice of the number of drafts."""
        if self.stages > 1:
            return {}
        limit, ranges = self.disable_by_batch_size, [(first, last, n) for first, last, n in self.drafts_by_batch_size]
        if self.adaptive:  # vLLM captures graphs for these; ScheduledDrafts then replaces the table
            ranges = [(1, 1, self.num_speculative_tokens), (2, LARGEST_BATCH, 0)]
        elif limit is not None:
            ranges = ranges or [(1, LARGEST_BATCH, self.num_speculative_tokens)]
            ranges = [(first, min(last, limit), n) for first, last, n in ranges if first <= limit]
            ranges.append((limit + 1, LARGEST_BATCH, 0))
        return {"num_speculative_tokens_per_batch_size": ranges} if ranges else {}

    @property
    def split(self) -> int:
        """The layer after which a worker group's first stage ends, d_bar."""
        assert self.stages > 1 and self.exit_layer is not None
        return self.exit_layer[0]

    @property
    def partition(self) -> str:
        """Layers of each pipeline stage, as a value of VLLM_PP_LAYER_PARTITION."""
        return f"{self.split},{self.num_layers - self.split}"

    def summary(self) -> str:
        """The start-up line: method, layers, heads and limits of drafting."""
        group, exits = self.stages > 1, "/".join(map(str, self.exit_layer or ()))
        if group:
            where = f"worker group over 2 pipeline stages of {self.partition.replace(',', ' and ')} layers, "
            where += f"{self.candidates} candidate{'s' * (self.candidates > 1)}"
            drafts = f"{self.num_speculative_tokens + 1} micro-steps a step"
        else:
            where = f"exit layer {exits} of {self.num_layers}" if exits else ""
            drafts = f"{'up to ' * self.adaptive}{self.num_speculative_tokens} drafts"
            drafts += f"{' by batch size' * bool(self.drafts_by_batch_size)} ({self.draft_sample_method})"
        lookup = f"prompt lookup from {self.prompt_lookup_min} tokens on"
        about_heads = f" ({self.heads_summary})" if self.heads_summary else ""
        without = "no heads (final norm and LM head of the target)"
        if self.spec.looks_up_alone:
            without = "no heads (train some, or set exit_layer for early drafting without heads)"
        parts = (
            where,
            f"heads {self.model}{about_heads}" if self.model else without,
            drafts,
            lookup if self.prompt_lookup_min else "",
            f"draft vocabulary {self.draft_vocab_size}" if self.draft_vocab_size else "",
            f"gamma {self.gamma:g}" if exits and not group else "",
            "" if self.eps_b is None else f"eps_b {self.eps_b:g}",
        )
        limit = f"above {self.disable_by_batch_size} requests" if self.disable_by_batch_size else "none"
        drafting = ", ".join(filter(None, parts))
        return f"drafting with method {self.method}: {drafting}, batch cut-off: {limit}"

# SPDX-License-Identifier: Apache-2.0
"""Options resolved for a target, its heads and the pipeline stages."""

from typing import Any

from pydantic import Field

from vllm_ppd.heads.base import LARGEST_BATCH
from vllm_ppd.vllm_plugins.config.options import DraftingOptions
from vllm_ppd.vllm_plugins.registry import METHODS, WORKER, MethodSpec


class DraftingConfig(DraftingOptions):
    """Options resolved for a target: exit layers are known and within the model (None:
    not used).
    """

    num_layers: int
    stages: int = 1  # pipeline stages; with 2 the method is a worker group
    # Whether the target is cut, by the method or for heads that read states within it
    cuts: bool = False
    heads_summary: str = ""
    # The heads' calibration gives these
    drafts_by_batch_size: list[list[int]] = Field(default_factory=list)

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
        limit = self.disable_by_batch_size
        ranges = [(first, last, n) for first, last, n in self.drafts_by_batch_size]
        if (
            self.adaptive
        ):  # vLLM captures graphs for these; our scheduler then chooses among them
            ranges = [(1, 1, self.num_speculative_tokens), (2, LARGEST_BATCH, 0)]
        elif limit is not None:
            ranges = ranges or [(1, LARGEST_BATCH, self.num_speculative_tokens)]
            ranges = [
                (first, min(last, limit), n)
                for first, last, n in ranges
                if first <= limit
            ]
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
        parts = [*self._place(), self._heads(), self._drafts(), *self._limits()]
        cut_off = "none"
        if self.disable_by_batch_size:
            cut_off = f"above {self.disable_by_batch_size} requests"
        return (
            f"drafting with method {self.method}: {', '.join(parts)}, batch cut-off: "
            f"{cut_off}"
        )

    def _place(self) -> list[str]:
        if self.stages > 1:
            layers = self.partition.replace(",", " and ")
            candidates = (
                "1 candidate"
                if self.candidates == 1
                else f"{self.candidates} candidates"
            )
            return [
                f"worker group over 2 pipeline stages of {layers} layers",
                candidates,
            ]
        if self.exit_layer is None:
            return []
        exits = "/".join(str(layer) for layer in self.exit_layer)
        return [f"exit layer {exits} of {self.num_layers}"]

    def _heads(self) -> str:
        if self.model:
            about = f" ({self.heads_summary})" if self.heads_summary else ""
            return f"heads {self.model}{about}"
        if self.spec.looks_up_alone:
            return (
                "no heads (train some, or set exit_layer for early drafting without "
                "heads)"
            )
        return "no heads (final norm and LM head of the target)"

    def _drafts(self) -> str:
        if self.stages > 1:
            return f"{self.num_speculative_tokens + 1} micro-steps a step"
        drafts = f"{self.num_speculative_tokens} drafts"
        if self.adaptive:
            drafts = f"up to {drafts}"
        if self.drafts_by_batch_size:
            drafts += " by batch size"
        return f"{drafts} ({self.draft_sample_method})"

    def _limits(self) -> list[str]:
        limits = []
        if self.prompt_lookup_min:
            limits.append(f"prompt lookup from {self.prompt_lookup_min} tokens on")
        if self.draft_vocab_size:
            limits.append(f"draft vocabulary {self.draft_vocab_size}")
        if self.exit_layer and self.stages == 1:
            limits.append(f"gamma {self.gamma:g}")
        if self.eps_b is not None:
            limits.append(f"eps_b {self.eps_b:g}")
        return limits

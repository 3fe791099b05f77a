# SPDX-License-Identifier: Apache-2.0
"""Options resolved for a target and its heads."""

from typing import Any

from vllm_ppd.heads.base import LARGEST_BATCH
from vllm_ppd.vllm_plugins.config.options import DraftingOptions
from vllm_ppd.vllm_plugins.registry import LEARNING, METHODS, MethodSpec

# Up to this number of drafts a step on a GPU has all or none; of more also half
FEW_DRAFTS = 3


class DraftingConfig(DraftingOptions):
    """Options resolved for a target: exit layers are known and within the model
    (None: not used).
    """

    num_layers: int
    # Whether the target is cut, by the method or for heads that read states within it
    cuts: bool = False
    heads_summary: str = ""
    learns: bool = False  # whether heads are learned, beside lookups

    @property
    def spec(self) -> MethodSpec:
        """The method's record."""
        return LEARNING if self.learns else METHODS[self.method]

    @property
    def stages(self) -> int:
        """Pipeline stages; with 2 the method is a worker group."""
        return self.spec.stages

    def choice_of_drafts(self) -> dict[str, Any]:
        """vLLM's options for its choice of the number of drafts."""
        if self.stages > 1:
            return {}
        drafts = self.num_speculative_tokens
        # vLLM captures graphs for these; our scheduler then chooses among them
        ranges = [(1, 1, drafts), (2, LARGEST_BATCH, 0)]
        if self.adaptive and drafts > FEW_DRAFTS:
            ranges[1:] = [(2, 2, drafts // 2), (3, LARGEST_BATCH, 0)]
        return {"num_speculative_tokens_per_batch_size": ranges}

    @property
    def exits(self) -> tuple[int, ...]:
        """The exit layers, ascending; none in methods without exits."""
        if isinstance(self.exit_layer, list):
            return tuple(self.exit_layer)
        return () if self.exit_layer is None else (self.exit_layer,)

    @property
    def num_exits(self) -> int:
        """The number of places at which a step's drafts may be read."""
        return max(len(self.exits), 1)

    @property
    def split(self) -> int:
        """The layer after which a worker group's first stage ends, d_bar."""
        assert self.stages > 1
        return self.exits[0]

    @property
    def partition(self) -> str:
        """Layers of each pipeline stage, as a value of VLLM_PP_LAYER_PARTITION."""
        return f"{self.split},{self.num_layers - self.split}"

    def summary(self) -> str:
        """The start-up line: method, layers, heads and limits of drafting."""
        grouped = self.stages > 1
        parts = []
        if grouped:
            layers = self.partition.replace(",", " and ")
            parts.append(f"2 pipeline stages of {layers} layers")
            if self.candidates > 1:
                parts.append(f"{self.candidates} candidates")
        elif self.exits:
            layers = " or ".join(map(str, self.exits))
            parts.append(f"exit layer {layers} of {self.num_layers}")
        if self.model:
            parts.append(f"heads {self.model} ({self.heads_summary})")
        elif self.learns:
            parts.append("no heads until some are learned from the answers")
        elif self.spec.looks_up_alone:
            parts.append("no heads")
        else:
            parts.append("no heads (final norm and LM head of the target)")
        if grouped:
            parts.append(f"{self.num_speculative_tokens + 1} micro-steps a step")
        else:
            most = "up to " if self.adaptive else ""
            parts.append(
                f"{most}{self.num_speculative_tokens} drafts ({self.draft_sample_method})"
            )
        if self.prompt_lookup_min:
            parts.append(f"prompt lookup from {self.prompt_lookup_min} tokens on")
        if self.draft_vocab_size:
            parts.append(f"draft vocabulary {self.draft_vocab_size}")
        if self.exits and not grouped:
            parts.append(f"gamma {self.gamma:g}")
        if self.eps_b is not None:
            parts.append(f"eps_b {self.eps_b:g}")
        cut_off = "none"
        if self.disable_by_batch_size:
            cut_off = f"above {self.disable_by_batch_size} requests"
        return (
            f"drafting with method {self.method}: {', '.join(parts)}, batch cut-off: "
            f"{cut_off}"
        )

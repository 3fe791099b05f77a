# SPDX-License-Identifier: Apache-2.0
"""Options resolved for a target, its heads and the pipeline stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field

from vllm_ppd.heads.base import LARGEST_BATCH
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config.options import DraftingOptions
from vllm_ppd.vllm_plugins.config.refusals import refuse_options
from vllm_ppd.vllm_plugins.registry import METHODS, WORKER, MethodSpec

if TYPE_CHECKING:
    from vllm_ppd.heads.base import HeadsConfig


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
        parts = [*self._place(), self._heads(), self._drafts(), *self._limits()]
        cut_off = "none"
        if self.disable_by_batch_size:
            cut_off = f"above {self.disable_by_batch_size} requests"
        return f"drafting with method {self.method}: {', '.join(parts)}, batch cut-off: {cut_off}"

    def _place(self) -> list[str]:
        if self.stages > 1:
            layers = self.partition.replace(",", " and ")
            candidates = "1 candidate" if self.candidates == 1 else f"{self.candidates} candidates"
            return [f"worker group over 2 pipeline stages of {layers} layers", candidates]
        if self.exit_layer is None:
            return []
        exits = "/".join(str(layer) for layer in self.exit_layer)
        return [f"exit layer {exits} of {self.num_layers}"]

    def _heads(self) -> str:
        if self.model:
            about = f" ({self.heads_summary})" if self.heads_summary else ""
            return f"heads {self.model}{about}"
        if self.spec.looks_up_alone:
            return "no heads (train some, or set exit_layer for early drafting without heads)"
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


# Default number of requests up to which a worker group runs; larger loads fill the pipeline with batches.
GROUP_CUT_OFF = 8
# Defaults of prompt lookup alone: tokens that must agree, and drafts.
LOOKUP_FROM, LOOKUP_DRAFTS = 3, 5


class Machine(NamedTuple):
    """The machine that serves."""

    on_cpu: bool = True
    device: str = ""  # name by which calibrations are matched

    @classmethod
    def of_platform(cls) -> Machine:
        return cls(platform.is_cpu(), platform.full_device_name())


CPU = Machine()


def with_default_method(options: DraftingOptions, stages: int = 1) -> DraftingOptions:
    """Options in which method ppd without heads becomes lookup, unless an option of early drafting is given.

    An exit that was neither trained nor calibrated often costs more than it gains; a lookup costs nothing if it has no
    draft.
    """
    early = options.model is not None or stages > 1 or {*METHODS["ppd"].options} & options.model_fields_set
    return options if options.method != "ppd" or early else options.model_copy(update={"method": "lookup"})


def resolve(
    options: DraftingOptions,
    num_layers: int,
    heads: HeadsConfig | None = None,
    stages: int = 1,
    machine: Machine = CPU,
) -> DraftingConfig:
    """Fill in values that depend on the target (L layers), the heads, the pipeline stages and the machine.

    Raises:
        OptionError: if an exit layer is outside 1..L-1 or has no head, if more drafts are asked than the heads make, or
            if options contradict each other.
    """
    given, method = options.model_fields_set, METHODS[options.method]
    values = options.model_dump() | {"num_layers": num_layers, "stages": stages}
    values["cuts"] = method.cuts or bool(getattr(heads, "layers", ()))
    if heads is not None:
        values |= {name: value for name, value in heads.recommended.items() if name not in given}
        if "exit_layer" not in given and values["exit_layer"] is not None:
            values["exit_layer"] = values["exit_layer"][:1]
        values["heads_summary"] = heads.describe()
        unverified = not options.verify and "draft_vocab_size" not in given  # output needs the whole vocabulary
        if unverified or values["draft_vocab_size"] == heads.target.vocab_size:
            values["draft_vocab_size"] = None
    if "exit_layer" in method.options and (stages > 1 or values["exit_layer"] is None) and "exit_layer" not in given:
        values["exit_layer"] = (_default_exit(num_layers, heads, stages, machine),)
    if method.looks_up_alone:
        defaults: dict[str, Any] = {"prompt_lookup_min": LOOKUP_FROM, "num_speculative_tokens": LOOKUP_DRAFTS}
        defaults["draft_sample_method"] = "greedy"  # there is nothing to draw from
        values |= {name: value for name, value in defaults.items() if name not in given}
    if stages > 1 and options.disable_by_batch_size is None:
        values["disable_by_batch_size"] = GROUP_CUT_OFF

    values["adaptive"] = options.adaptive and options.verify and stages == 1
    chosen_by_user = given & {"num_speculative_tokens", "exit_layer"}
    if heads is not None and not values["adaptive"] and not chosen_by_user:
        values["drafts_by_batch_size"] = _calibrated_drafts(heads, machine.device)

    config = DraftingConfig.model_construct(**values)
    refuse_options(options, config, heads)
    return config


def _default_exit(num_layers: int, heads: HeadsConfig | None, stages: int, machine: Machine) -> int:
    if stages > 1:  # the stages' split d_bar, at least d/2 (PPD, Theorem 4.1)
        half = (num_layers + 1) // 2
        return min((layer for layer in getattr(heads, "exit_layers", ()) if layer >= half), default=half)
    # On a GPU a shallow pass is bound by launches, and fewer layers have fewer launches.
    return max(1, num_layers // (2 if machine.on_cpu else 4))


def _calibrated_drafts(heads: HeadsConfig, device: str) -> list[list[int]]:
    """[First batch size, last one, drafts] of the heads' calibration, if it was made on this device."""
    if heads.calibration is None or heads.calibration.device != device:
        return []
    ranges, most = heads.calibration.num_speculative_tokens_per_batch_size, heads.num_speculative_tokens
    return [[first, last, min(drafts, most)] for first, last, drafts in ranges]

# SPDX-License-Identifier: Apache-2.0
"""Values for unset options, from the target, the heads, the pipeline stages and the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config.options import DraftingOptions
from vllm_ppd.vllm_plugins.config.refusals import refuse_options
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.registry import METHODS

if TYPE_CHECKING:
    from vllm_ppd.heads.base import HeadsConfig


# Default number of requests up to which a worker group runs; larger loads fill the
# pipeline with batches.
GROUP_CUT_OFF = 8
# Defaults of prompt lookup alone: tokens that must agree, and drafts.
LOOKUP_FROM = 3
LOOKUP_DRAFTS = 5


class Machine(NamedTuple):
    """The machine that serves."""

    on_cpu: bool = True
    device: str = ""  # name by which calibrations are matched

    @classmethod
    def of_platform(cls) -> Machine:
        return cls(platform.is_cpu(), platform.full_device_name())


CPU = Machine()


def with_default_method(options: DraftingOptions, stages: int = 1) -> DraftingOptions:
    """Options in which method ppd without heads becomes lookup, unless an option of
    early drafting is given.

    An exit that was neither trained nor calibrated often costs more than it gains; a
    lookup costs nothing if it has no draft.
    """
    early = (
        options.model is not None
        or stages > 1
        or {*METHODS["ppd"].options} & options.model_fields_set
    )
    return (
        options
        if options.method != "ppd" or early
        else options.model_copy(update={"method": "lookup"})
    )


def resolve(
    options: DraftingOptions,
    num_layers: int,
    heads: HeadsConfig | None = None,
    stages: int = 1,
    machine: Machine = CPU,
) -> DraftingConfig:
    """Fill in values that depend on the target (L layers), the heads, the pipeline
    stages and the machine.

    Raises:
        OptionError: if an exit layer is outside 1..L-1 or has no head, if more drafts
            are asked than the heads make, or if options contradict each other.
    """
    given = options.model_fields_set
    method = METHODS[options.method]
    values = options.model_dump() | {"num_layers": num_layers, "stages": stages}
    values["cuts"] = method.cuts or bool(getattr(heads, "layers", ()))
    if heads is not None:
        values |= {
            name: value
            for name, value in heads.recommended.items()
            if name not in given
        }
        if "exit_layer" not in given and values["exit_layer"] is not None:
            values["exit_layer"] = values["exit_layer"][:1]
        values["heads_summary"] = heads.describe()
        # Output needs the whole vocabulary
        unverified = not options.verify and "draft_vocab_size" not in given
        if unverified or values["draft_vocab_size"] == heads.target.vocab_size:
            values["draft_vocab_size"] = None
    if (
        "exit_layer" in method.options
        and (stages > 1 or values["exit_layer"] is None)
        and "exit_layer" not in given
    ):
        values["exit_layer"] = (_default_exit(num_layers, heads, stages, machine),)
    if method.looks_up_alone:
        defaults: dict[str, Any] = {
            "prompt_lookup_min": LOOKUP_FROM,
            "num_speculative_tokens": LOOKUP_DRAFTS,
        }
        defaults["draft_sample_method"] = "greedy"  # there is nothing to draw from
        values |= {name: value for name, value in defaults.items() if name not in given}
    if stages > 1 and options.disable_by_batch_size is None:
        values["disable_by_batch_size"] = GROUP_CUT_OFF

    if stages > 1 or not options.verify:
        values["adaptive"] = False
    chosen_by_user = given & {"num_speculative_tokens", "exit_layer"}
    if heads is not None and not values["adaptive"] and not chosen_by_user:
        values["drafts_by_batch_size"] = _calibrated_drafts(heads, machine.device)

    config = DraftingConfig.model_construct(**values)
    refuse_options(options, config, heads)
    return config


def _default_exit(
    num_layers: int, heads: HeadsConfig | None, stages: int, machine: Machine
) -> int:
    if stages > 1:  # the stages' split d_bar, at least d/2 (PPD, Theorem 4.1)
        half = (num_layers + 1) // 2
        return min(
            (layer for layer in getattr(heads, "exit_layers", ()) if layer >= half),
            default=half,
        )
    # On a GPU a shallow pass is bound by launches, and fewer layers have fewer
    # launches.
    return max(1, num_layers // (2 if machine.on_cpu else 4))


def _calibrated_drafts(heads: HeadsConfig, device: str) -> list[list[int]]:
    """[First batch size, last one, drafts] of the heads' calibration, if it was made on
    this device.
    """
    if heads.calibration is None or heads.calibration.device != device:
        return []
    ranges = heads.calibration.num_speculative_tokens_per_batch_size
    most = heads.num_speculative_tokens
    return [[first, last, min(drafts, most)] for first, last, drafts in ranges]

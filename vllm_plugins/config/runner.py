# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's model runners drafts: V2 where vLLM would take it and the method runs on it, else V1."""

from __future__ import annotations

from typing import Literal, NamedTuple

from vllm_ppd.vllm_plugins.config.options import DraftingOptions, OptionError
from vllm_ppd.vllm_plugins.registry import METHODS

Runner = Literal["v1", "v2"]


class Runners(NamedTuple):
    """What vLLM and the platform say of model runners."""

    asked: str | None  # by VLLM_USE_V2_MODEL_RUNNER
    default: str  # of a method that runs on both
    has_triton: bool  # V2 is made of Triton kernels
    target_needs_v1: str | None = None  # what of the target keeps methods that cut it on V1
    device: str = ""  # its name, which calibrations hold for


V1_ALONE = Runners(None, "v1", False)


def choose_runner(
    options: DraftingOptions, stages: int, exit_layers: tuple[int, ...], runners: Runners
) -> tuple[Runner, str | None]:
    """The model runner, and what keeps the options on V1 where vLLM would take V2.

    Raises:
        OptionError: if V2 is asked for and cannot run them.
    """
    reason = needs_v1(options, stages, exit_layers, runners.target_needs_v1)
    asked = runners.asked if options.runner == "auto" else options.runner
    if asked == "v2":
        said = "runner=v2" if options.runner == "v2" else "VLLM_USE_V2_MODEL_RUNNER=1"
        if reason is not None:
            raise OptionError(f"{said} is not supported with {reason}, which needs runner V1; leave out one of them")
        if not runners.has_triton:
            raise OptionError(f"{said} needs Triton, which vLLM does not find here; leave it out")
        return "v2", None
    if asked == "v1" or runners.default == "v1":
        return "v1", None
    return ("v2", None) if reason is None else ("v1", reason)


def needs_v1(
    options: DraftingOptions, stages: int, exit_layers: tuple[int, ...], target: str | None = None
) -> str | None:
    """What of the options, or of the target where a method cuts it, runs on V1 alone; or None."""
    reasons = {
        str(target): target is not None and METHODS[options.method].cuts,
        "pipeline parallelism": stages > 1,
        "schedule: parallel": options.schedule == "parallel",
        "verify: false": not options.verify,
        "several exit layers": len(exit_layers) > 1,
        "prompt_lookup_min": options.prompt_lookup_min is not None,
        f"method {options.method}": METHODS[options.method].speculator is None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def check_v1_options(options: DraftingOptions) -> None:
    """Refuse options whose work is vLLM's own on V2.

    Raises:
        OptionError: naming the option.
    """
    if "step_costs" in options.model_fields_set:
        raise OptionError(
            f"speculative_config: step_costs={options.step_costs} is of no use with runner V2, which follows none; "
            "leave it out, or give runner v1"
        )

# SPDX-License-Identifier: Apache-2.0
"""What the options leave open, filled in from the target, the heads and the pipeline stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ppd.heads.quote import quoted
from vllm_ppd.vllm_plugins.config.options import DraftingOptions, OptionError
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.config.runner import V1_ALONE, Runners, check_v1_options, choose_runner
from vllm_ppd.vllm_plugins.registry import METHODS

if TYPE_CHECKING:
    from vllm_ppd.heads.base import HeadsConfig

# Requests up to which a worker group runs unless told otherwise: from there on the pipeline has batches of its own.
GROUP_CUT_OFF = 8


def resolve(
    options: DraftingOptions,
    num_layers: int,
    heads: HeadsConfig | None = None,
    stages: int = 1,
    runners: Runners = V1_ALONE,
) -> DraftingConfig:
    """Fill what depends on the target (L layers), on the heads, on the pipeline stages and on vLLM's model runners.

    Raises:
        OptionError: if an exit layer is outside 1..L-1 or has no head, or more drafts are asked than the heads make.
    """
    values = options.model_dump()
    if heads is not None:
        values["heads_summary"] = heads.describe()
        if "num_speculative_tokens" not in options.model_fields_set:
            values["num_speculative_tokens"] = heads.num_speculative_tokens
        elif heads.max_drafts is not None and options.num_speculative_tokens > heads.max_drafts:
            raise OptionError(
                f"speculative_config: num_speculative_tokens={options.num_speculative_tokens} is more than the "
                f"{heads.max_drafts} drafts that the heads in {quoted(options.model)} make"
            )
        values["draft_vocab_size"] = _draft_vocabulary(options, heads)
    if METHODS[options.method].heads == "early" and stages == 1:
        # A shallow pass on a GPU is bound by its launches, of which fewer layers have fewer.
        share = 4 if runners.default == "v2" else 2
        values["exit_layer"] = _exits(options, num_layers, heads, max(1, num_layers // share))
    if options.method == "dynamo" and options.eps_b is None and heads is not None:
        values["eps_b"] = heads.sampling.eps_b  # type: ignore[attr-defined]
    values |= {"num_layers": num_layers, "stages": stages}
    # A group's tokens are final, and so are unverified ones: none of them is in vain.
    final = "pipeline parallelism" if stages > 1 else None if options.verify else "verify: false"
    exits = values["exit_layer"] if stages == 1 else None
    values["runner"], values["v1_because"] = choose_runner(options, stages, exits or (), runners)
    on_v2 = values["runner"] == "v2"
    # On V2 it is vLLM's adaptive verification, whose costs are those of one machine's CUDA graphs: on request alone.
    wanted = options.adaptive and (not on_v2 or "adaptive" in options.model_fields_set)
    values["adaptive"] = wanted and final is None
    if on_v2:
        check_v1_options(options)
        values["drafts_by_batch_size"] = _calibrated_drafts(options, heads, runners.device)
    if "adaptive" in options.model_fields_set and options.adaptive and not values["adaptive"]:
        raise OptionError(
            f"speculative_config: adaptive is of no use with {final}: no token is drafted in vain there; leave it out"
        )
    if options.prompt_lookup_drafts is not None and options.prompt_lookup_min is None:
        raise OptionError(
            f"speculative_config: prompt_lookup_drafts={options.prompt_lookup_drafts} needs prompt_lookup_min; give "
            "both, or neither"
        )
    if final is not None and "draft_sample_method" in options.model_fields_set:
        raise OptionError(
            f"speculative_config: draft_sample_method is of no use with {final}, which verifies no draft; leave it out"
        )
    without_lookup = {
        "pipeline parallelism": stages > 1,
        "verify: false": not options.verify,
        "schedule: parallel": options.schedule == "parallel",
    }
    for setting, holds in without_lookup.items():
        if holds and options.prompt_lookup_min is not None:
            raise OptionError(
                f"speculative_config: prompt_lookup_min={options.prompt_lookup_min} is not supported with {setting}; "
                "leave it out"
            )
    if stages > 1:
        values["exit_layer"] = split_at(options, num_layers, heads)
        values["disable_by_batch_size"] = options.disable_by_batch_size or GROUP_CUT_OFF
    elif options.candidates > 1:
        raise OptionError(
            f"speculative_config: candidates={options.candidates} needs pipeline stages that wait; give "
            "--pipeline-parallel-size 2, or leave candidates out"
        )
    return DraftingConfig(**values)


def _calibrated_drafts(options: DraftingOptions, heads: HeadsConfig | None, device: str) -> list[list[int]]:
    """[First batch size, last one, drafts] of the heads' calibration; none on another device or for other options."""
    given = {"num_speculative_tokens", "exit_layer"} & options.model_fields_set
    if heads is None or heads.calibration is None or heads.calibration.device != device or given:
        return []
    found, most = heads.calibration.num_speculative_tokens_per_batch_size, heads.num_speculative_tokens
    return [[first, last, min(drafts, most)] for first, last, drafts in found]


def split_at(options: DraftingOptions, num_layers: int, heads: Any) -> tuple[int, ...]:
    """The one layer at which a worker group's stages are split, d_bar: from d/2 up (PPD, Theorem 4.1).

    Raises:
        OptionError: if it is not one layer, or too early, or the first stage has no head for it.
    """
    half = (num_layers + 1) // 2
    if options.exit_layer is None:
        with_head = [layer for layer in getattr(heads, "exit_layers", ()) if half <= layer < num_layers]
        if heads is not None and not with_head:
            raise OptionError(
                f"speculative_config: the heads in {quoted(options.model)} have no exit in {half}..{num_layers - 1}, "
                "where a worker group's stages can be split; train one there or leave the heads out"
            )
        return (min(with_head, default=half),)
    exits = _exits(options, num_layers, heads, half)
    if len(exits) > 1 or exits[0] < half:
        raise OptionError(
            f"speculative_config: exit_layer={','.join(map(str, exits))} cannot split two pipeline stages; give one "
            f"layer in {half}..{num_layers - 1}"
        )
    return exits


def _draft_vocabulary(options: DraftingOptions, heads: HeadsConfig) -> int | None:
    """How many tokens are drafted; None is the whole vocabulary."""
    asked, whole = options.draft_vocab_size, heads.target.vocab_size
    if asked is None:
        return heads.draft_vocab_size if options.verify else None
    given = f"speculative_config: draft_vocab_size={asked}"
    if asked > whole:
        raise OptionError(f"{given} is more than the model's vocabulary of {whole}")
    if asked == whole:
        return None
    if heads.counts_tensor is None:
        raise OptionError(f"{given} needs token counts, which the heads in {quoted(options.model)} lack; leave it out")
    if not options.verify:
        raise OptionError(f"{given} limits what is drafted, and unverified drafts are the output; leave it out")
    return asked


def _exits(options: DraftingOptions, num_layers: int, heads: Any, default: int) -> tuple[int, ...]:
    exits = options.exit_layer or (heads.serving_exits if heads is not None else (default,))
    outside = [layer for layer in exits if not 1 <= layer < num_layers]
    if outside:
        raise OptionError(
            f"speculative_config: exit_layer={quoted(outside[0])} is outside 1..{num_layers - 1}; "
            f"this model has {num_layers} layers"
        )
    headless = [layer for layer in exits if heads is not None and layer not in heads.exit_layers]
    if headless:
        raise OptionError(
            f"speculative_config: exit_layer={quoted(headless[0])} has no head in {quoted(options.model)}, "
            f"which has heads for layers {', '.join(map(str, heads.exit_layers))}"
        )
    return exits

# SPDX-License-Identifier: Apache-2.0
"""Translation of options that ask for one of our methods into vLLM's own configuration."""

from __future__ import annotations

import logging
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

from vllm_ppd.heads import hub
from vllm_ppd.heads.errors import UserError
from vllm_ppd.heads.folder import check_folder, load_config
from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.heads.options import FitOptions
from vllm_ppd.heads.target import check_target
from vllm_ppd.heads.text import quoted
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config.found import fingerprint_at_hand, found_heads
from vllm_ppd.vllm_plugins.config.naming import is_ours, with_method
from vllm_ppd.vllm_plugins.config.options import (
    AUTO,
    CONFIG_KEY,
    FLAGS_OF_VLLM,
    DraftingOptions,
    OptionError,
    check_mapping,
    flag_fields,
    flag_name,
    parse_options,
)
from vllm_ppd.vllm_plugins.config.refusals import (
    refuse_complete_config,
    refuse_layers_read,
    refuse_scheduling,
    refuse_target,
)
from vllm_ppd.vllm_plugins.config.resolve import resolve
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.registry import ALIASES, METHODS, PPD

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import ModelConfig, ParallelConfig

    from vllm_ppd.heads.base import HeadsConfig, TargetFingerprint

logger = logging.getLogger("vllm.vllm_ppd")

DRAFTED = 3072  # most tokens that learned heads draft


def active_config(holder: Any) -> DraftingConfig | None:
    """Our configuration in a VllmConfig or EngineArgs, or None if vLLM runs without us."""
    additional = getattr(holder, "additional_config", None)
    return (
        _parsed(additional[CONFIG_KEY])
        if isinstance(additional, dict) and CONFIG_KEY in additional
        else None
    )


def required_config(vllm_config: Any, holder: object) -> DraftingConfig:
    """The same as active_config, for objects that vLLM builds only with our
    configuration.

    Raises:
        RuntimeError: if there is none.
    """
    config = active_config(vllm_config)
    if config is None:
        raise RuntimeError(
            f"{type(holder).__name__} is started by vllm-ppd itself; set a method of "
            "vllm-ppd instead"
        )
    return config


# Called for every request and every step
_parsed = lru_cache(DraftingConfig.model_validate_json)


def activate(
    args: Any, model_config: ModelConfig, parallel_config: ParallelConfig
) -> DraftingConfig | None:
    """If vLLM's EngineArgs ask for one of our methods, check everything and rewrite
    them to its `custom_class`.

    Returns:
        The resolved configuration, or None if they do not; then nothing is changed.

    Raises:
        OptionError, HeadsError: on bad input, before any model loads.
    """
    with hub.token(args.hf_token):
        asked = _asked(args)
        config: DraftingConfig | None
        if is_ours(asked):
            given = with_method(asked, parallel_config.pipeline_parallel_size)
            config = _resolved(
                parse_options(given), args, model_config, parallel_config
            )
            name = asked.get("method", asked.get("model"))
            if name in ALIASES:
                logger.info(
                    "vllm-ppd: method %s resolved to %s", name, config.method
                )
            _rewrite(args, config)
        else:
            _refuse_flags(asked)
            config = active_config(args)  # the same arguments may be used twice
    if config is not None:
        parallel_config.worker_cls = config.spec.worker
    return config


def _refuse_flags(asked: dict[str, Any]) -> None:
    """Refuse our flags beside another method than ours."""
    for key in asked:
        if key in flag_fields() and not platform.is_speculative_option(key):
            raise OptionError(
                f"{flag_name(key)} is an option of vllm-ppd; add --speculative-model "
                "ppd or a heads folder"
            )


def _asked(args: Any) -> dict[str, Any]:
    """speculative_config with vLLM's three short flags merged in.

    Raises:
        OptionError: if one of our options is given twice with different values: spelt
            with - and _, or also as a flag.
    """
    given = [
        (key.replace("-", "_"), f"speculative_config[{quoted(key)}]", value)
        for key, value in check_mapping(args.speculative_config).items()
    ]
    for name, flag in FLAGS_OF_VLLM.items():
        given.append(
            (name, flag, getattr(args, flag.removeprefix("--").replace("-", "_")))
        )
    asked: dict[str, Any] = {}
    sources: dict[str, str] = {}
    conflict = None
    for name, source, value in given:
        if value is None:
            continue
        if name not in asked:
            asked[name] = value
            sources[name] = source
        elif asked[name] != value:
            conflict = (
                f"{sources[name]}={quoted(asked[name])} and {source}={quoted(value)} "
                "differ; set only one of them"
            )
    if conflict is not None and is_ours(asked):
        raise OptionError(conflict)
    return asked


def _resolved(
    options: DraftingOptions,
    args: Any,
    model_config: ModelConfig,
    parallel_config: ParallelConfig,
) -> DraftingConfig:
    """Find heads if they are left open, check our options against the target and the
    heads, and fill in missing values.

    Raises:
        OptionError, HeadsError: with one line that says what is wrong, where, and what
            to do instead. Heads that were found raise nothing: others take their place.
    """
    # Hashing takes a second for large vocabularies, and not every target is hashed.
    at_hand = cache(partial(fingerprint_at_hand, model_config))
    checked = partial(
        _checked,
        args=args,
        model_config=model_config,
        parallel_config=parallel_config,
        at_hand=at_hand,
    )
    if options.method != PPD:
        return checked(options)
    found = []
    if options.heads == AUTO:
        found = found_heads(model_config, at_hand, options.learn_dir)
    nexts = [*(f"heads {heads.model}" for heads in found[1:]), "lookups alone"]
    for heads, instead in zip(found, nexts, strict=False):
        try:
            method = load_config(heads.model).kind
            config = checked(
                options.model_copy(
                    update={"method": method, "model": heads.model}
                ),
                is_found=True,
            )
        except (UserError, OSError) as error:
            logger.warning(
                "vllm-ppd: heads %s are not used (%s). Next: %s",
                heads.model,
                error,
                instead,
            )
            continue
        logger.info(
            "vllm-ppd: using heads %s: %s. --ppd-heads %s pins them; --ppd-heads none "
            "uses none",
            heads.model,
            heads.reason,
            heads.model,
        )
        return config
    if options.heads == AUTO and not found:
        logger.info(
            "vllm-ppd: no heads were found for %s; `ppd fit %s` makes some within %g "
            "minutes or another limit",
            model_config.model,
            model_config.model,
            FitOptions.model_fields["minutes"].default,
        )
    learns = _can_learn(options, args, model_config)
    update: dict[str, Any] = {"method": "lookup"}
    if learns:
        update["draft_vocab_size"] = min(DRAFTED, model_config.get_vocab_size())
    return checked(options.model_copy(update=update), learns=learns)


def _can_learn(
    options: DraftingOptions, args: Any, model_config: ModelConfig
) -> bool:
    """Whether heads can be learned beside lookups.

    Capped logits are no product of a matrix, of which a draft vocabulary reads a part.
    An external launcher has a scheduler for each rank, whose orders would differ.
    """
    text = model_config.hf_text_config
    return (
        options.learn
        and options.heads == AUTO
        and not getattr(text, "final_logit_softcapping", None)
        and not args.use_fp64_gumbel
        and args.distributed_executor_backend != "external_launcher"
    )


def _checked(
    options: DraftingOptions,
    args: Any,
    model_config: ModelConfig,
    parallel_config: ParallelConfig,
    at_hand: Callable[[], TargetFingerprint],
    is_found: bool = False,
    learns: bool = False,
) -> DraftingConfig:
    """The same for a method and heads that are decided.

    Raises:
        OptionError, HeadsError: as _resolved, also for heads that were found.
    """
    refuse_target(options, model_config, parallel_config, args)
    heads = None
    if options.model is not None:
        strict = is_found or not options.verify
        heads = _checked_heads(options, model_config, at_hand(), strict)
    config = resolve(
        options,
        model_config.hf_text_config.num_hidden_layers,
        heads,
        platform.is_cpu(),
        learns,
    )
    refuse_scheduling(config, args)
    if is_found:
        refuse_complete_config(config)
    return config


def _checked_heads(
    options: DraftingOptions,
    model_config: ModelConfig,
    at_hand: TargetFingerprint,
    strict: bool,
) -> HeadsConfig:
    """The configuration of a heads folder, after a complete check against the target.

    Raises:
        HeadsError: if they do not fit.
    """
    folder = str(options.model)
    target = model_config.hf_text_config
    kind = METHODS[options.method].heads
    heads = load_config(folder, None if kind is None else KINDS[kind])
    other_weights = check_target(heads, folder, target, at_hand, strict)
    if other_weights is not None:
        logger.warning("vllm-ppd: %s", other_weights)
    elif heads.fingerprint.lm_head and not at_hand.lm_head:
        logger.info(
            "vllm-ppd: the target's lm_head was not compared with that of the heads' "
            "target, because it is not on this disk, or is stored in another form"
        )
    refuse_layers_read(heads, folder, model_config)
    check_folder(folder)
    return heads


def _rewrite(args: Any, config: DraftingConfig) -> None:
    """Write a resolved configuration into vLLM's EngineArgs."""
    args.spec_method = args.spec_model = args.spec_tokens = None
    args.speculative_config = {
        "method": "custom_class",
        "model": config.spec.speculator,
        "num_speculative_tokens": config.num_speculative_tokens,
        # For a sampled one vLLM would allocate a q(x) that nothing reads
        "draft_sample_method": "greedy",
        **config.choice_of_drafts(),
    }
    args.additional_config = {
        **(args.additional_config or {}),
        CONFIG_KEY: config.model_dump_json(),
    }
    if config.stages > 1:
        args.scheduler_cls = config.spec.scheduler
        args.async_scheduling = False

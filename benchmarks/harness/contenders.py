# SPDX-License-Identifier: Apache-2.0
"""The contenders of a benchmark, each with a name and vLLM's speculative_config."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.options import BenchOptions
from vllm_ppd.heads.io import load_config

BASE = "vLLM"
CONTROL = "vLLM, again"
DRAFTS = 3  # for contenders that recommend no number


@dataclass(frozen=True)
class Contender:
    """A speculative_config (None: no speculation), with engine arguments and environment variables.

    Attributes:
        shares: name of the contender on whose engine this contender takes its turns.
        adaptive: whether drafting is adaptive in those turns (None: as in the other contender's).
    """

    name: str
    speculative_config: dict[str, Any] | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    shares: str | None = None
    adaptive: bool | None = None


def contenders(options: BenchOptions) -> list[Contender]:
    """The base, a control that is the base once more, then the contenders that the options name.

    Raises:
        BenchError, HeadsError: if a checkpoint is missing or a contender is not a speculative_config.
    """
    everyone = [Contender(BASE), Contender(CONTROL), *_from_heads(options), *_without_checkpoint(options)]
    everyone += _checkpoints_of_vllm(options)
    for text in options.also:
        everyone.append(_further(text, options.drafts, {contender.name: contender for contender in everyone}))
    if CONTROL in (contender.name for contender in everyone[2:]):
        del everyone[1]
    names = [contender.name for contender in everyone]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BenchError(f"two contenders are called {twice!r}; name one with --also NAME=...")
    return everyone


def _from_heads(options: BenchOptions) -> Iterator[Contender]:
    for folder in options.heads:
        config = load_config(folder)
        name = " ".join(dict.fromkeys((config.method, Path(folder).name)))
        drafts = options.drafts
        if drafts is not None and config.max_drafts is not None:
            drafts = min(drafts, config.max_drafts)
        yield Contender(name, {"model": folder} | ({} if drafts is None else {"num_speculative_tokens": drafts}))


def _without_checkpoint(options: BenchOptions) -> Iterator[Contender]:
    drafts = options.drafts or DRAFTS
    if "ppd" in options.plain:
        yield Contender("ppd, no heads", {"method": "ppd", "num_speculative_tokens": drafts})
    if "ngram" in options.plain:
        lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
        yield Contender("ngram", {"method": "ngram", "num_speculative_tokens": drafts, **lookup})
    if "suffix" in options.plain and find_spec("arctic_inference") is not None:
        yield Contender("suffix", {"method": "suffix"})


def _checkpoints_of_vllm(options: BenchOptions) -> Iterator[Contender]:
    for method in ("eagle", "draft_model"):
        folder = getattr(options, method)
        if folder is None:
            continue
        config, name = Path(folder) / "config.json", method.replace("_", " ")
        if not config.is_file():
            raise BenchError(f"--{method.replace('_', '-')} {folder} has no config.json; give a checkpoint folder")
        if method == "eagle" and "eagle3" in config.read_text().lower():
            method, name = "eagle3", "eagle3"
        drafts = options.drafts or DRAFTS
        yield Contender(name, {"method": method, "model": folder, "num_speculative_tokens": drafts})


def _further(text: str, drafts: int | None, before: dict[str, Contender]) -> Contender:
    name, equals, value = text.partition("=")
    try:
        config = json.loads(value)
    except ValueError:
        config = None
    if not equals or not isinstance(config, dict):
        raise BenchError(f'--also {text}: not NAME={{JSON}}, as \'ppd, exit 9={{"method": "ppd", "exit_layer": 9}}\'')
    if (shares := config.get("shares")) is not None:
        if shares not in before or before[shares].shares is not None or config.keys() - {"shares", "adaptive"}:
            raise BenchError(f'--also {text}: "shares" names a contender before it, with "adaptive" alone beside it')
        return replace(before[shares], name=name, shares=shares, adaptive=config.get("adaptive"))
    engine, environment = config.pop("engine", {}), config.pop("environment", {})
    if config and drafts is not None:
        config.setdefault("num_speculative_tokens", drafts)
    return Contender(name, config or None, engine, environment)

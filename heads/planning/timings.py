# SPDX-License-Identifier: Apache-2.0
"""Files for `--timings`: results of `ppd bench decode`, or the step costs that a server measured."""

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError, model_validator
from typing_extensions import Self

from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.measured import Setting
from vllm_ppd.heads.quote import quoted

StepSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def line(timed: dict[int, float]) -> Callable[[float], float]:
    """Seconds by rows, made monotonic: that fewer rows take more time is noise."""
    rows, values = np.array(sorted(timed.items()), dtype=float).T
    seconds = np.minimum.accumulate(values[::-1])[::-1]
    slope = seconds[0] / rows[0] if len(rows) == 1 else (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
    return lambda wanted: float(np.interp(wanted, rows, seconds) + slope * max(0.0, wanted - rows[-1]))


def steps_of(file: str, target: str) -> dict[int, float]:
    """Median seconds of vLLM's decode step by batch size, from the target's newest run of `ppd bench decode`.

    Raises:
        HeadsError: if the file has no such run.
    """
    try:
        runs = [run for run in json.loads(Path(file).read_text())["runs"] if run["options"]["model"] == target]
        alone = [(run["options"], [turn for turn in run["turns"] if turn["contender"] == "vLLM"]) for run in runs]
        alone = [(options | {"temperature": 0}, turns) for options, turns in alone if turns]
        seconds: dict[int, list[float]] = defaultdict(list)
        for options, turns in alone:
            for turn in turns if options == alone[-1][0] else []:
                seconds[int(turn["batch"])].append(turn["window_seconds"] / turn["steps"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HeadsError(
            f"{file!r} has neither results of `ppd bench decode` nor a server's step costs ({error!r})"
        ) from None
    if not seconds:
        raise HeadsError(f"{file!r} has no results of {target}; run `ppd bench decode --model {target}` on it")
    return {size: statistics.median(values) for size, values in seconds.items()}


class Engine(BaseModel):
    """A server that measured its steps."""

    target: str
    method: str
    heads: str | None
    num_speculative_tokens: int
    exit_layer: tuple[int, ...] | None
    draft_vocab_size: int | None

    def missing(self, method: str, options: dict[str, Any], drafts: int) -> str:
        """The part of a setting that the server did not run, such as `exit_layer 4`; empty if it ran all.

        Args:
            method, options: as a server takes them.
            drafts: of a step.
        """
        exit_layer, *others = self.exit_layer or (None,)
        if method != self.method:
            return f"method {method}"
        if not _same(options.get("model"), self.heads):
            return f"these heads (it has {quoted(self.heads)})" if "model" in options else "no heads"
        measured = {"exit_layer": None if others else exit_layer, "draft_vocab_size": self.draft_vocab_size}
        for name, value in measured.items():
            if options.get(name) != value:
                return f"{name} {options.get(name, 'unset')}"
        return f"num_speculative_tokens {drafts}" if drafts > self.num_speculative_tokens else ""


class StepTable(BaseModel):
    """Seconds of decode steps at the batch sizes and numbers of drafts that were measured."""

    sizes: list[int] = Field(min_length=1)  # requests, ascending
    counts: list[int] = Field(min_length=1)  # drafts per request, ascending from 0
    seconds: list[list[StepSeconds]]  # [sizes, counts], in the fastest round
    second_fastest: list[list[StepSeconds]] | None = None  # [sizes, counts], in the second fastest round

    @model_validator(mode="after")
    def _rectangular(self) -> Self:
        for table in (self.seconds, self.seconds if self.second_fastest is None else self.second_fastest):
            if [len(row) for row in table] != [len(self.counts)] * len(self.sizes):
                raise ValueError(f"seconds must be {len(self.sizes)} x {len(self.counts)} numbers")
        return self


class ServedSteps(StepTable):
    """Decode steps of a server, including the host's work and launches in its model runner."""

    engine: Engine
    counts: list[int] = Field(min_length=2)

    @cached_property
    def _by_count(self) -> list[Callable[[float], float]]:
        """Seconds by requests, for each number of drafts."""
        return [line(dict(zip(self.sizes, column, strict=True))) for column in zip(*self.seconds, strict=True)]

    def step(self, batch: int, setting: Setting | None = None) -> float:
        """Seconds of a step with the drafts of a setting (None: without drafts).

        Launches do not grow with the drafts: fewer than the fewest that were measured take as long. All drafts are
        verified, whatever their confidence.
        """
        seconds = np.minimum.accumulate([by_size(batch) for by_size in self._by_count[::-1]])[::-1]
        if setting is None:
            return float(seconds[0])
        return float(np.interp(setting.drafts, self.counts[1:], seconds[1:]))


def served_steps(file: str, target: str) -> ServedSteps | None:
    """The steps of a server's cost file (VLLM_CACHE_ROOT/vllm_ppd_step_costs); None for any other file.

    Raises:
        HeadsError: if they are damaged, or of another target.
    """
    try:
        stored = json.loads(Path(file).read_text())
        table = stored.get("method", stored)
        if "counts" not in table:
            return None
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    try:
        steps = ServedSteps.model_validate({**table, "engine": stored.get("engine")})
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise HeadsError(
            f"step costs in {quoted(file)} are damaged or of an older version ({where}); start the server once with "
            "--ppd-step-costs measure"
        ) from None
    if not _same(target, steps.engine.target):
        raise HeadsError(
            f"{quoted(file)} has steps of {quoted(steps.engine.target)}, not of {quoted(target)}; start a server of "
            "that target once, or name the target with --target"
        )
    return steps


def _same(name: str | None, other: str | None) -> bool:
    """Whether two names mean the same folder or the same repository on the Hub."""
    if name is None or other is None:
        return name is other
    if os.path.exists(name) and os.path.exists(other):
        return os.path.samefile(name, other)
    return name.partition("@")[0] == other.partition("@")[0]

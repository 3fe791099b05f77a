# SPDX-License-Identifier: Apache-2.0
"""What tables share: the target, tasks, texts, heads and engines, each made when a table first asks for it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from vllm_ppd.benchmarks.decode.options import DecodeOptions
from vllm_ppd.benchmarks.decode.run import decode
from vllm_ppd.benchmarks.decode.table import rows_of
from vllm_ppd.benchmarks.harness.contenders import Contender
from vllm_ppd.benchmarks.harness.results import Row as Summary
from vllm_ppd.benchmarks.papers.options import TablesOptions
from vllm_ppd.benchmarks.papers.table import Missing
from vllm_ppd.benchmarks.papers.tasks import Task, answers, read_task
from vllm_ppd.heads.calibration.options import CalibrationOptions
from vllm_ppd.heads.calibration.run import open_calibration
from vllm_ppd.heads.calibration.session import Calibration, data_windows
from vllm_ppd.heads.calibration.text import Texts, generate
from vllm_ppd.heads.files import write_text
from vllm_ppd.heads.io import load_config
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def once(make: Callable[Concatenate[Context, Arguments], Result]) -> Callable[Concatenate[Context, Arguments], Result]:
    """Decorate a function of a context whose result the context keeps, for each of its further arguments."""

    @wraps(make)
    def made_once(context: Context, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        name: Hashable = (make.__module__, make.__qualname__, args, *sorted(kwargs.items()))
        if name not in context.made:
            context.made[name] = make(context, *args, **kwargs)
        result: Result = context.made[name]
        return result

    return made_once


class Context:
    """What every table is measured with.

    Raises:
        HeadsError: if a heads folder cannot be read.
    """

    def __init__(self, options: TablesOptions) -> None:
        self.options = options
        self.folders: dict[str, list[str]] = defaultdict(list)  # by kind of heads
        for folder in options.heads:
            self.folders[load_config(folder).kind].append(folder)
        self.calibrations: dict[str, Calibration] = {}
        self.made: dict[Hashable, Any] = {}

    def heads(self, kind: str) -> list[str]:
        """The folders of a kind, at least one.

        Raises:
            Missing: if the options name none.
        """
        if not self.folders[kind]:
            raise Missing(f"needs {kind} heads: give a folder that `ppd train {kind}` wrote with --heads")
        return self.folders[kind]

    def calibration(self, folder: str) -> Calibration:
        """Target and heads as `ppd calibrate` has them; all folders share the target.

        Raises:
            HeadsError, TrainingError: on heads, a target or data that do not fit.
        """
        if folder not in self.calibrations:
            options = CalibrationOptions(
                heads=folder, data=self.options.files, precision=self.options.dtype, recommend=False,
                **self.settings("model", "batch", "seed", "device", "trust_remote_code"),
            )  # fmt: skip
            self.calibrations[folder] = open_calibration(options, next(iter(self.calibrations.values()), None))
        return self.calibrations[folder]

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks of the options."""
        options = self.options
        limits = options.prompts, options.longest, options.prompt_tokens
        return [read_task(task, self.target, *limits) for task in options.task]

    @property
    def task(self) -> Task:
        """The task of tables that take one."""
        return self.tasks[0]

    @once
    def texts(self, task: Task, temperature: float = 0.0) -> Texts:
        """What the target writes after the prompts of a task, by temperature."""
        torch.manual_seed(self.options.seed)
        prompts, starts, _ = task.padded(self.target.device)
        size, tokens = max(32, self.options.batch), self.options.new_tokens
        return generate(self.target, prompts, tokens, temperature, size, starts)

    def sampled(self, task: Task) -> Texts:
        """Texts at the options' temperature."""
        return self.texts(task, self.options.temperature)

    @once
    def windows(self, task: Task) -> list[Batch]:
        """What likelihoods are measured on: the texts of a task, or what the target sampled after its prompts."""
        if task.texts:
            return data_windows([task.path], self.target, self.options.prompts, self.options.batch)
        return answers(self.sampled(task), self.options.batch)

    @cached_property
    def num_layers(self) -> int:
        """Decoder layers of the target, d or L."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.options.model, trust_remote_code=self.options.trust_remote_code)
        return int(config.get_text_config().num_hidden_layers)

    @property
    def target(self) -> Target:
        """The target of whichever heads were loaded first."""
        folder = next((folders[0] for folders in self.folders.values() if folders), None)
        if folder is None:
            raise Missing("needs heads: give folders with --heads")
        return self.calibration(folder).target

    def speeds(
        self, contenders: list[Contender], task: Task | None = None, **changes: Any
    ) -> dict[str, Summary]:  # fmt: skip
        """Decode one request at a time in turns; every turn is written beside the tables as soon as it is over.

        Args:
            contenders: the base first.
            task: whose prompts are decoded (None: the first one's).
            changes: of DecodeOptions' fields.

        Returns:
            Summaries as decode/table.py makes them by contender, earlier turns of the same contenders included;
            contenders that failed are missing.

        Raises:
            BenchError: if the base does not start.
            Stopped: on Ctrl-C.
        """
        task = task or self.task
        shared = self.settings(
            "model", "rounds", "new_tokens", "eager", "kv_cache_gib", "engine", "alive", "seed", "trust_remote_code",
        )  # fmt: skip
        options = DecodeOptions(**shared | {
            "batch_sizes": (1,), "dtype": self.options.engine_dtype, "out": str(self.turns),
            "data": (str(self._prompts_file(task)),), "prompt_tokens": max(map(len, task.prompts)),
        } | changes)  # fmt: skip
        return {row["contender"]: row for row in rows_of(decode(options, contenders)[0])}

    def _prompts_file(self, task: Task) -> Path:
        """A task's prompts as token ids, for engines; shuffled, as a task has them by length."""
        path = self.turns.with_suffix("") / f"{task.name.replace('/', '-')}-{len(task.prompts)}.jsonl"
        order = np.random.default_rng(self.options.seed).permutation(len(task.prompts))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(json.dumps({"prompt_token_ids": task.prompts[i]}) + "\n" for i in order))
        return path

    def settings(self, *names: str) -> dict[str, Any]:
        """Some of the options, for a table to name."""
        return {name: getattr(self.options, name) for name in names}

    @property
    def turns(self) -> Path:
        """The file of the engines' turns."""
        out = Path(self.options.out)
        return out.with_name(f"{out.stem}.turns{out.suffix or '.json'}")


def timed(row: Summary | None) -> list[Any]:
    """The median speed-up of a contender, and its quartiles as a table shows them."""
    return [None, None] if row is None else [row["speed_up"][0], "{1:.2f}-{2:.2f}".format(*row["speed_up"])]


def loops(context: Context) -> dict[str, str]:
    """The share of repeated 4-grams in the greedy texts of each task, for a table to name."""
    shares = (f"{context.texts(task).repeated_4_grams():.2f} ({task.name})" for task in context.tasks)
    return {"repeated 4-grams": ", ".join(shares)}

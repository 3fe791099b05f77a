# SPDX-License-Identifier: Apache-2.0
"""What tables share: the target, texts, heads and engines, each made when a table first asks for it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from vllm_ppd.benchmarks.decode.options import DecodeOptions
from vllm_ppd.benchmarks.decode.run import decode
from vllm_ppd.benchmarks.decode.table import rows_of
from vllm_ppd.benchmarks.harness.contenders import Contender
from vllm_ppd.benchmarks.harness.results import Row
from vllm_ppd.benchmarks.papers import Missing
from vllm_ppd.benchmarks.papers.options import TablesOptions
from vllm_ppd.benchmarks.papers.tasks import Group, Task, answers, counterpart, read_task
from vllm_ppd.heads.calibration.options import CalibrationOptions
from vllm_ppd.heads.calibration.run import Calibration, data_windows
from vllm_ppd.heads.calibration.text import Texts, generate
from vllm_ppd.heads.io import load_config, write_text
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

Made = TypeVar("Made")


class Context:
    """Given to every table.

    Raises:
        HeadsError: if a heads folder cannot be read.
    """

    def __init__(self, options: TablesOptions) -> None:
        self.options = options
        self.folders: dict[str, list[str]] = defaultdict(list)  # by kind of heads
        for folder in options.heads:
            self.folders[load_config(folder).kind].append(folder)
        self._calibrations: dict[str, Calibration] = {}
        self._made: dict[Hashable, Any] = {}

    def heads(self, kind: str) -> list[str]:
        """The folders of a kind, at least one.

        Raises:
            Missing: if none was given.
        """
        if not self.folders[kind]:
            raise Missing(f"needs {kind} heads: give a folder that `ppd train {kind}` wrote with --heads")
        return self.folders[kind]

    def once(self, name: Hashable, make: Callable[[], Made]) -> Made:
        """What make gives, made when a table first asks for it by that name."""
        if name not in self._made:
            self._made[name] = make()
        made: Made = self._made[name]
        return made

    def calibration(self, folder: str) -> Calibration:
        """Target and heads as `ppd calibrate` has them; all folders share the target.

        Raises:
            HeadsError, TrainingError: on heads, a target or data that do not fit.
        """
        if folder not in self._calibrations:
            same = self.settings("model", "batch", "seed", "device", "trust_remote_code")
            own = {"heads": folder, "data": self.options.files, "precision": self.options.dtype, "recommend": False}
            options = CalibrationOptions(**{**own, **same})
            first = next(iter(self._calibrations.values()), None)
            self._calibrations[folder] = Calibration(options, first)
        return self._calibrations[folder]

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks of the options."""
        given = self.options
        limits = given.prompts, given.longest, given.prompt_tokens
        return [read_task(task, self.target, *limits) for task in given.task]

    @property
    def task(self) -> Task:
        """The task of tables that take one."""
        return self.tasks[0]

    def counterpart(self, data_set: str) -> Group | None:
        """Our task or category that stands for a data set of the papers."""
        return counterpart(data_set, self.tasks)

    def texts(self, task: Task, temperature: float = 0.0, **sampling: float) -> Texts:
        """What the target writes after the prompts of a task; the same texts for the same way of decoding."""

        def make() -> Texts:
            torch.manual_seed(self.options.seed)
            prompts, starts = task.padded(self.target.device)
            size, tokens = max(32, self.options.batch), self.options.new_tokens
            return generate(self.target, prompts, tokens, temperature, size, starts, **sampling)

        return self.once(("texts", task.name, temperature, *sorted(sampling.items())), make)

    def sampled(self, task: Task) -> Texts:
        """Texts at the options' temperature."""
        return self.texts(task, self.options.temperature)

    def windows(self, task: Task) -> list[Batch]:
        """What likelihoods are measured on: the texts of a task, or what the target sampled after its prompts."""

        def make() -> list[Batch]:
            if task.texts:
                return data_windows([task.path], self.target, self.options.prompts, self.options.batch)
            return answers(self.sampled(task), self.options.batch)

        return self.once(("windows", task.name), make)

    @cached_property
    def num_layers(self) -> int:
        """d, or L: decoder layers of the target."""
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
        self,
        everyone: list[Contender],
        kind: type[DecodeOptions] = DecodeOptions,
        task: Task | None = None,
        **changes: Any,
    ) -> dict[tuple[str, int], Row]:
        """Decode in turns, the base first in each round; every turn is kept beside the tables as soon as it is over.

        Args:
            everyone: who is compared; the first is contenders.BASE.
            kind: GroupOptions for worker groups.
            task: whose prompts are decoded (None: the first one's).
            changes: of DecodeOptions' fields; by default one request at a time.

        Returns:
            Summaries as decode/table.py makes them, by contender and batch size, earlier turns of the same
            contenders included; contenders that failed are missing.

        Raises:
            BenchError: if the base does not start.
            Stopped: on Ctrl-C.
        """
        same = self.settings(
            "model", "rounds", "new_tokens", "eager", "kv_cache_gib", "engine", "alive", "seed", "trust_remote_code",
        )  # fmt: skip
        task = task or self.task
        own = {
            "batch_sizes": (1,), "dtype": self.options.engine_dtype, "out": str(self.turns),
            "data": (str(self._prompts_file(task)),), "prompt_tokens": max(map(len, task.prompts)),
        }  # fmt: skip
        options = kind(**{**same, **own, **changes})
        return {(row["contender"], row["batch"]): row for row in rows_of(decode(options, everyone)[0])}

    def _prompts_file(self, task: Task) -> Path:
        """A task's prompts as token ids, for engines; in an order of no meaning."""
        path = self.turns.with_suffix("") / f"{task.name.replace('/', '-')}-{len(task.prompts)}.jsonl"
        order = np.random.default_rng(self.options.seed).permutation(len(task.prompts))  # they stand by length
        text = "".join(json.dumps({"prompt_token_ids": task.prompts[i]}) + "\n" for i in order)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        return path

    @staticmethod
    def quartiles(summary: Row | None) -> str | None:
        """Lower and upper quartile of a speed-up, as a table shows them."""
        return None if summary is None else "{1:.2f}-{2:.2f}".format(*summary["speed_up"])

    def settings(self, *names: str) -> dict[str, Any]:
        """Some of the options, for a table to name."""
        return {name: getattr(self.options, name) for name in names}

    @property
    def turns(self) -> Path:
        """Where the turns of engines are kept."""
        out = Path(self.options.out)
        return out.with_name(f"{out.stem}.turns{out.suffix or '.json'}")

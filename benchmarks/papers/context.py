# SPDX-License-Identifier: Apache-2.0
"""What tables share: the target, texts, heads and engines, each made when a table first asks for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from vllm_ppd.benchmarks.decode.options import DecodeOptions
from vllm_ppd.benchmarks.decode.run import decode
from vllm_ppd.benchmarks.decode.table import rows_of
from vllm_ppd.benchmarks.harness.contenders import Contender
from vllm_ppd.benchmarks.harness.results import Row
from vllm_ppd.benchmarks.papers import Missing
from vllm_ppd.benchmarks.papers.options import TablesOptions
from vllm_ppd.heads.calibration.options import CalibrationOptions
from vllm_ppd.heads.calibration.run import Calibration
from vllm_ppd.heads.io import load_config
from vllm_ppd.heads.training.target import Target

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
        """Target, heads and texts as `ppd calibrate` has them; all folders share the target and the texts.

        Raises:
            HeadsError, TrainingError: on heads, a target or data that do not fit.
        """
        if folder not in self._calibrations:
            same = self.settings(
                "model", "data", "prompts", "prompt_tokens", "new_tokens", "temperature", "batch", "seed", "device",
                "trust_remote_code",
            )  # fmt: skip
            options = CalibrationOptions(
                **{"heads": folder, "precision": self.options.dtype, "recommend": False, **same}
            )
            first = next(iter(self._calibrations.values()), None)
            self._calibrations[folder] = Calibration(options, first)
        return self._calibrations[folder]

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
        self, everyone: list[Contender], kind: type[DecodeOptions] = DecodeOptions, **changes: Any
    ) -> dict[tuple[str, int], Row]:
        """Decode in turns, the base first in each round; every turn is kept beside the tables as soon as it is over.

        Args:
            everyone: who is compared; the first is contenders.BASE.
            kind: GroupOptions for worker groups.
            changes: of DecodeOptions' fields; by default one request at a time.

        Returns:
            Summaries as decode/table.py makes them, by contender and batch size, earlier turns of the same
            contenders included; contenders that failed are missing.

        Raises:
            BenchError: if the base does not start.
            Stopped: on Ctrl-C.
        """
        same = self.settings(
            "model", "data", "rounds", "prompt_tokens", "new_tokens", "eager", "kv_cache_gib", "engine", "alive",
            "seed", "trust_remote_code",
        )  # fmt: skip
        own = {"batch_sizes": (1,), "dtype": self.options.engine_dtype, "out": str(self.turns)}
        options = kind(**{**same, **own, **changes})
        return {(row["contender"], row["batch"]): row for row in rows_of(decode(options, everyone)[0])}

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

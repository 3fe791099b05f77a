# SPDX-License-Identifier: Apache-2.0
"""The choices and progress of a `ppd fit` in a file, with which the same command continues after a kill."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_ppd.heads.errors import TrainingError, refuse_other_options
from vllm_ppd.heads.files import first_problem, write_text
from vllm_ppd.heads.progress import Stage
from vllm_ppd.heads.quote import place

NAME = "state.json"
KEPT_EVERY = 2.0  # seconds between saves within a stage
SHARES = {"data": 0.5, "training": 0.35, "calibration": 0.13, "plan": 0.02}  # of the time limit


class Facts(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid")

    options: dict[str, Any]
    seconds: dict[str, float] = {}  # of each stage so far
    chosen: dict[str, Any] = {}  # decisions by measured speeds, stored before they take effect
    done: list[str] = []  # finished stages


class State:
    """The state of a fit in its work folder, which has one writer.

    Args:
        folder: the work folder.
        options: those that must be the same for a stopped run to continue, including `minutes`.

    Raises:
        TrainingError: if the folder belongs to a fit with other options, or is damaged.
    """

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.path, self._lock = folder / NAME, threading.Lock()
        self.facts = Facts(options=options)
        if self.path.exists():
            try:
                self.facts = Facts.model_validate_json(self.path.read_bytes())
            except ValidationError as error:
                raise TrainingError(
                    f"{place(self.path)} is damaged ({first_problem(error)}); delete {place(folder)} to start again"
                ) from None
        refuse_other_options(f"{place(folder)} is of a fit", self.facts.options, options, "another --out")
        self._keep("options", self.facts.options)

    def choose(self, name: str, make: Callable[[], Any]) -> Any:
        """The choice kept under a name; if there is none, make() chooses, and the choice is kept."""
        if name not in self.facts.chosen:
            self._keep("chosen", self.facts.chosen | {name: make()})
        return self.facts.chosen[name]

    def finish(self, name: str) -> None:
        """Note that a stage is done."""
        self._keep("done", [*self.facts.done, name])

    def stage(self, name: str) -> Stage:
        """The progress line of a stage, with its share of the remaining time."""
        facts, number = self.facts, [*SHARES].index(name) + 1
        left = 60 * facts.options["minutes"] - sum(s for other, s in facts.seconds.items() if other != name)
        of_the_rest = SHARES[name] / sum(share for other, share in SHARES.items() if other not in facts.done)
        planned = max(left, 0.0) * of_the_rest

        def tick(seconds: float) -> None:
            if seconds >= self.facts.seconds.get(name, -KEPT_EVERY) + KEPT_EVERY:
                self._keep("seconds", self.facts.seconds | {name: round(seconds, 1)})

        title = f"{number}/{len(SHARES)} {name:<11} {SHARES[name]:>4.0%}"
        return Stage(title, planned, facts.seconds.get(name, 0.0), tick)

    def _keep(self, field: str, value: Any) -> None:
        with self._lock:
            self.facts = self.facts.model_copy(update={field: value})
            write_text(self.path, self.facts.model_dump_json(indent=1) + "\n")

# SPDX-License-Identifier: Apache-2.0
"""Progress on stderr: a bar for each piece of work, or, for commands of several stages, a line for each stage."""

from __future__ import annotations

import io
import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, TextIO

from tqdm import tqdm

CELLS = 16  # of a stage's bar


class Stage:
    """The progress line of a stage, with its elapsed time and status; bars and messages go there meanwhile.

    It is drawn at once, then twice a second on a terminal and every 20 seconds elsewhere.

    Args:
        title: names the stage.
        planned: seconds.
        spent: seconds that earlier runs took for it.
        tick: called with the seconds so far whenever the line is drawn, in a separate thread.
    """

    current: ClassVar[Stage | None] = None

    def __init__(self, title: str, planned: float, spent: float, tick: Callable[[float], None]) -> None:
        self.title, self.planned, self._tick = title, planned, tick
        self._started, self.status = time.monotonic() - spent, "starting"
        self._ended = threading.Event()

    @property
    def seconds(self) -> float:
        """Seconds that the stage has taken so far, in all runs."""
        return time.monotonic() - self._started

    def line(self) -> str:
        share = min(self.seconds / max(self.planned, 1e-9), 1.0)
        bar = ("#" * int(CELLS * share)).ljust(CELLS, ".")
        return f"{self.title} [{bar}] {_clock(self.seconds)} of {_clock(self.planned)}  {self.status}"

    def __enter__(self) -> Stage:
        Stage.current = self
        self._thread = threading.Thread(target=self._draw_on, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Stage.current = None
        self._ended.set()
        self._thread.join()
        self._draw("\n")

    def _draw_on(self) -> None:
        end, seconds = ("", 0.5) if sys.stderr.isatty() else ("\n", 20.0)
        self._draw(end)
        while not self._ended.wait(seconds):
            self._draw(end)

    def _draw(self, end: str) -> None:
        self._tick(self.seconds)
        line = self.line()
        if sys.stderr.isatty():
            columns = shutil.get_terminal_size().columns - 1
            line = "\r" + line[:columns].ljust(columns)
        print(line, end=end, file=sys.stderr, flush=True)


class Bar(tqdm):
    """A bar of tqdm, or the status of the current stage."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        if Stage.current is not None:
            settings |= {"file": io.StringIO()}
        super().__init__(*arguments, **settings)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if Stage.current is None:
            super().display(msg, pos)
        elif msg is None:
            scaled = tqdm.format_sizeof if self.unit_scale else "{:,}".format
            total = "" if self.total is None else f" of {scaled(self.total)}"
            details = f", {self.postfix}" if self.postfix else ""
            Stage.current.status = f"{self.desc}: {scaled(self.n)}{total}{self.unit}{details}"


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line (to stderr if no file is given), or make it the status of the current stage."""
    if Stage.current is None:
        print(text, file=sys.stderr if file is None else file, flush=True)
    else:
        Stage.current.status = text.removeprefix("vllm-ppd: ")


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"

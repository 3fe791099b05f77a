# SPDX-License-Identifier: Apache-2.0
"""Turns of contenders, one of which computes at a time, in rounds at each load."""

import contextlib
import signal
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tqdm import tqdm

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.contenders import Contender
from vllm_ppd.benchmarks.harness.options import BenchOptions
from vllm_ppd.benchmarks.harness.results import Results, Turn

MEMORY_SHARE = 0.8  # share of the free memory for further engines


class Stopped(KeyboardInterrupt):
    """The user stopped the run; finished turns are in the file of results."""


class Runs(Protocol):
    """A contender that has started: an engine or a server."""

    name: str
    facts: dict[str, Any]  # peak_bytes of it, and free_bytes beside it

    def close(self) -> None:
        """End the contender's processes in any state."""


Running = TypeVar("Running", bound=Runs)
Load = TypeVar("Load", bound=Hashable)
Answer = TypeVar("Answer")


class Session(ABC, Generic[Running, Load]):
    """The running contenders and their turns.

    Args:
        options: of all.
        loads: of each contender, with the results to which its turns are added.
    """

    def __init__(self, options: BenchOptions, loads: dict[Load, Results]) -> None:
        self.options, self.loads = options, loads
        self.results = list(dict.fromkeys(loads.values()))
        self.alive: list[Running] = []
        self.started = 0
        self.asked_to_stop = False

    @abstractmethod
    def start(self, contender: Contender, log: Path) -> Running:
        """Start a contender, or raise BenchError."""

    def ready(self, running: Running) -> None:
        """Wait until a contender can take turns, or raise BenchError."""

    def settle(self, running: Running) -> None:
        """Prepare a contender when all that start with it have started."""

    @abstractmethod
    def warm_up(self, running: Running, load: Load) -> None:
        """Let a contender compute without measurement before the rounds at a load."""

    @abstractmethod
    def turn(self, running: Running, load: Load, number: int) -> Turn:
        """Measure a contender in a round at a load, or raise BenchError."""

    def after(self, running: Running, load: Load) -> None:
        """Do what follows at a load when all contenders have had their turns at all loads."""

    def round(self, load: Load, number: int) -> Iterator[Turn]:
        """A turn of each running contender, in the order in which they were started."""
        for running in list(self.alive):
            turn = self.attempt(running, self.turn, running, load, number)
            if turn is not None:
                yield {"contender": running.name} | turn

    def measure(self, everyone: list[Contender]) -> None:
        """Measure all turns of all contenders, the base first; each turn is written as soon as it ends.

        Raises:
            BenchError: if the base fails; others are left out.
            Stopped: on Ctrl-C.
        """
        with tempfile.TemporaryDirectory(prefix="ppd-bench-") as folder:
            try:
                with self._listening():
                    self._measure(everyone, Path(folder))
            except KeyboardInterrupt:
                for results in self.results:
                    results.write()  # a write may have been stopped
                turns, out = sum(len(results.run["turns"]) for results in self.results), self.options.out
                raise Stopped(f"stopped; {turns} turns are kept in {out}; the same command adds to them") from None
            finally:
                self._close()
        for results in self.results:
            results.finish()

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Remember Ctrl-C, since Python drops the exception while an object is being finalised."""

        def stop(number: int, frame: Any) -> None:
            self.asked_to_stop = True
            raise KeyboardInterrupt

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _measure(self, everyone: list[Contender], logs: Path) -> None:
        """Measure contenders in groups that fit memory; the base stays in all of them."""
        base, *others = everyone
        together = self.options.together
        if not together:
            self._start([base], logs)
        room = self._room()
        total = self.options.rounds * len(self.loads) * len(others)
        with tqdm(total=total, desc="turns", mininterval=1) as progress:
            for group, first in enumerate(range(0, len(others), room)):
                chosen = others[first : first + room]
                if together:
                    self._start(chosen if self.alive else [base, *chosen], logs)
                else:
                    for contender in chosen:
                        self._start([contender], logs)
                for load in self.loads:
                    self._rounds(load, group, progress)
                for load in self.loads:
                    for running in list(self.alive):
                        self.attempt(running, self.after, running, load)
                self._close(first=1)

    def _start(self, chosen: list[Contender], logs: Path) -> None:
        """Start contenders together; those that fail are left out, except for the base."""
        begun: list[Running] = []
        since: dict[str, float] = {}
        for contender in chosen:
            self.started += 1
            since[contender.name] = time.monotonic()
            print(f"starting {contender.name} ...", flush=True)
            try:
                begun.append(self.start(contender, logs / f"{self.started}.log"))
            except BenchError as error:
                if not self.alive:
                    raise
                self._leave_out(contender.name, error)
            else:
                self.alive.append(begun[-1])
        for running in begun:
            self.attempt(running, self.ready, running)
            if running in self.alive:
                start = {"seconds": time.monotonic() - since[running.name], "peak_bytes": running.facts["peak_bytes"]}
                for results in self.results:
                    results.run.setdefault("starts", {})[running.name] = start
        for running in [running for running in begun if running in self.alive]:
            self.attempt(running, self.settle, running)

    def _room(self) -> int:
        """The number of contenders that can run beside the base."""
        if self.options.alive is not None:
            return self.options.alive - 1
        facts = self.alive[0].facts
        return max(1, int(MEMORY_SHARE * facts["free_bytes"] / facts["peak_bytes"]))

    def _rounds(self, load: Load, group: int, progress: Any) -> None:
        for running in list(self.alive):
            self.attempt(running, self.warm_up, running, load)
        for number in range(self.options.rounds):
            for turn in self.round(load, number):
                self.loads[load].add({"group": group, "round": number} | turn)
                progress.update(turn["contender"] != self.alive[0].name)

    def attempt(self, running: Running, work: Callable[..., Answer], *arguments: Any) -> Answer | None:
        """Do some work and return its result; a contender that fails is left out, except for the base."""
        if self.asked_to_stop:
            raise KeyboardInterrupt
        try:
            return work(*arguments)
        except BenchError as error:
            if running is self.alive[0]:
                raise
            self._leave_out(running.name, error)
            self.alive.remove(running)
            running.close()
            return None

    def _leave_out(self, name: str, error: BenchError) -> None:
        tqdm.write(f"left out: {error}")
        for results in self.results:
            results.fail(name, str(error))

    def _close(self, first: int = 0) -> None:
        for running in self.alive[first:]:
            running.close()
        del self.alive[first:]

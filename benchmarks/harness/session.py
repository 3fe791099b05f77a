# SPDX-License-Identifier: Apache-2.0
"""Who computes when: contenders take turns, one at a time, in rounds at each load.

OneByOne: A B C A B C ..., the base first in each round. The closed and the open loop order their rounds themselves.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tqdm import tqdm

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.contenders import Contender
from vllm_ppd.benchmarks.harness.options import BenchOptions
from vllm_ppd.benchmarks.harness.results import Results, Turn

MEMORY_SHARE = 0.8  # of what is free, for further engines


class Stopped(KeyboardInterrupt):
    """Stopped by the user; what was measured is kept."""


class Runs(Protocol):
    """A contender that has started: an engine or a server."""

    name: str
    facts: dict[str, Any]  # peak_bytes of it, and free_bytes beside it

    def close(self) -> None:
        """End its processes, whatever they do."""


Running = TypeVar("Running", bound=Runs)
Load = TypeVar("Load", bound=Hashable)
Done = TypeVar("Done")


class Session(ABC, Generic[Running, Load]):
    """The contenders that are alive, and their turns.

    Args:
        options: of all.
        loads: that each contender is put under, with the results that its turns are kept in.
    """

    def __init__(self, options: BenchOptions, loads: dict[Load, Results]) -> None:
        self.options, self.loads = options, loads
        self.alive: list[Running] = []
        self.started = 0
        self.asked_to_stop = False

    @abstractmethod
    def start(self, contender: Contender, log: Path) -> Running:
        """Start a contender, or raise BenchError."""

    def ready(self, one: Running) -> None:
        """Wait until a contender can take turns, or raise BenchError."""

    @abstractmethod
    def warm_up(self, one: Running, load: Load) -> None:
        """Let it compute what is not measured, before the rounds at a load."""

    @abstractmethod
    def round(self, load: Load, number: int) -> Iterable[Turn]:
        """Turns of those that are alive at a load, each with its contender's name; none if the round was disturbed."""

    def measure(self, everyone: list[Contender]) -> None:
        """All turns of everyone, the base first; each turn is kept as soon as it is over.

        Raises:
            BenchError: if the base fails; others are left out.
            Stopped: on Ctrl-C.
        """
        with tempfile.TemporaryDirectory(prefix="ppd-bench-") as folder:
            try:
                with self._listening():
                    self._measure(everyone, Path(folder))
            except KeyboardInterrupt:
                kept, out = sum(len(one.run["turns"]) for one in self._runs()), self.options.out
                raise Stopped(f"stopped; {kept} turns are kept in {out}, the same command adds to them") from None
            finally:
                self._close()
        for results in self._runs():
            results.finish()

    def _runs(self) -> list[Results]:
        return list(dict.fromkeys(self.loads.values()))

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Remember Ctrl-C: Python drops the exception where it comes while an object is being finalised."""

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
        """The base stays; the others come in groups of as many as there is room for."""
        base, *others = everyone
        together = self.options.together
        if not together:
            self._start([base], logs)
        room = self.room({} if together else self.alive[0].facts)
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
                    self._load(load, group, progress)
                self._close(keep=1)

    def _start(self, chosen: list[Contender], logs: Path) -> None:
        """Start contenders together; those that fail are left out, the base is not."""
        begun: list[Running] = []
        for contender in chosen:
            self.started += 1
            print(f"starting {contender.name} ...", flush=True)
            try:
                begun.append(self.start(contender, logs / f"{self.started}.log"))
            except BenchError as error:
                if not self.alive:
                    raise
                self._failed(contender.name, error)
            else:
                self.alive.append(begun[-1])
        for one in begun:
            self._tried(one, partial(self.ready, one))

    def room(self, facts: dict[str, Any]) -> int:
        """Contenders alive beside the base."""
        if self.options.alive is not None:
            return self.options.alive - 1
        return max(1, int(MEMORY_SHARE * facts["free_bytes"] / facts["peak_bytes"]))

    def _load(self, load: Load, group: int, progress: Any) -> None:
        for one in list(self.alive):
            self._tried(one, partial(self.warm_up, one, load))
        for number in range(self.options.rounds):
            for turn in self.round(load, number):
                self.loads[load].add({"group": group, "round": number} | turn)
                progress.update(turn["contender"] != self.alive[0].name)

    def _tried(self, one: Running, work: Callable[[], Done]) -> Done | None:
        """What the work returns; a contender that fails is left out, the base is not."""
        if self.asked_to_stop:
            raise KeyboardInterrupt
        try:
            return work()
        except BenchError as error:
            if one is self.alive[0]:
                raise
            self._failed(one.name, error)
            self.alive.remove(one)
            one.close()
            return None

    def _failed(self, name: str, error: BenchError) -> None:
        tqdm.write(f"left out: {error}")
        for results in self._runs():
            results.fail(name, str(error))

    def _close(self, keep: int = 0) -> None:
        for one in self.alive[keep:]:
            one.close()
        del self.alive[keep:]


class OneByOne(Session[Running, Load]):
    """Rounds in which everyone has a turn, in the order in which they were started."""

    @abstractmethod
    def turn(self, one: Running, load: Load, number: int) -> Turn:
        """Measure one round at a load.

        Raises:
            BenchError: if it fails.
        """

    def round(self, load: Load, number: int) -> Iterator[Turn]:
        for one in list(self.alive):
            turn = self._tried(one, partial(self.turn, one, load, number))
            if turn is not None:
                yield {"contender": one.name} | turn

# SPDX-License-Identifier: Apache-2.0
"""`ppd bench open-loop`: whether requests that arrive wait longer with heads than with vLLM alone, at any rate.

Servers that `ppd bench serve` measures one after another differ by more than a few per cent where the machine's speed
drifts. Here engines of one process take turns of a few steps, and each has a clock of its own, which stands still while
others compute, and goes on to the next arrival where nothing is to do. On every clock the same requests arrive: Poisson
arrivals at each rate (inf: all at once), with the lengths and texts of `ppd bench serve`. Nothing is sent over a
network, and texts are not detokenized. Heads draft as a server would let them (adaptive).

Waiting is chance: an engine that is a millisecond later takes a prompt in with the next one, for which everybody waits.
Of as few requests as a minute brings, vLLM's own two engines differ by several per cent in latency and TTFT for it, and
by one in the seconds that they compute.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.contenders import Contender, contenders
from vllm_ppd.benchmarks.harness.engine import Engine, share_weights
from vllm_ppd.benchmarks.harness.machine import restart_for_engines, undisturbed
from vllm_ppd.benchmarks.harness.results import Results, Turn, all_runs
from vllm_ppd.benchmarks.harness.session import Session
from vllm_ppd.benchmarks.serve.options import OpenLoopOptions
from vllm_ppd.benchmarks.serve.workload import Texts, draw_lengths


class Load(NamedTuple):
    temperature: float
    rate: float | None  # requests a second (None: all at once)


class Arrival(NamedTuple):
    """A request, and the second on each engine's clock at which it comes."""

    at: float
    prompt: list[int]
    tokens: int  # that it generates


class Served(NamedTuple):
    """What became of a request, in seconds after it came."""

    first: float  # up to its first token
    latency: float  # up to its last
    tokens: int
    steps: int  # of the engine while it was there
    drafting: int  # of these, with drafts
    engine: float  # seconds that the engine computed for it


class Replica:
    """An engine with a clock of its own, and the requests that come to it."""

    def __init__(self, engine: Engine) -> None:
        self.name, self.facts, self.close = engine.name, engine.facts, engine.close
        self._engine = engine
        self._runs = 0

    def begin(self, arrivals: list[Arrival], temperature: float) -> None:
        """Set the clock to 0; the engine has nothing left to do."""
        self._runs += 1
        self.now = 0.0
        self.arrivals, self._temperature = arrivals, temperature
        self._waiting = deque(range(len(arrivals)))
        self._came: dict[str, tuple[int, int, int]] = {}  # which it is; steps, and those with drafts, before it
        self.first: dict[int, float] = {}
        self.engine = [0.0] * len(arrivals)
        self._undivided = 0.0  # seconds of steps that nobody had a token of
        self.served: dict[int, Served] = {}

    @property
    def done(self) -> bool:
        return len(self.served) == len(self.arrivals)

    def turn(self, steps: int) -> None:
        """So many steps, or fewer where no request is left."""
        for _ in range(steps):
            if self.done:
                return
            if not self._engine.busy:
                self.now = max(self.now, self.arrivals[self._waiting[0]].at)
            started = time.perf_counter()
            while self._waiting and self.arrivals[self._waiting[0]].at <= self.now:
                self._add(self._waiting.popleft())
            outputs = self._engine.step()
            took = time.perf_counter() - started
            self.now += took
            self.divide(took, [self._came[output.request_id][0] for output in outputs])
            for output in outputs:
                self._note(output)

    def _add(self, number: int) -> None:
        arrival, name = self.arrivals[number], f"{self._runs}-{number}"
        counts = self._engine.counts
        self._came[name] = number, counts["steps"], counts["drafting"]
        self._engine.add(name, arrival.prompt, arrival.tokens, self._temperature)

    def divide(self, seconds: float, numbers: list[int]) -> None:
        """A step of these requests took so long: each has the share of the tokens that the step took in of it."""
        self._undivided += seconds
        if not numbers:
            return
        tokens = [1 if i in self.first else len(self.arrivals[i].prompt) for i in numbers]
        for i, own in zip(numbers, tokens, strict=True):
            self.engine[i] += self._undivided * own / sum(tokens)
        self._undivided = 0.0

    def _note(self, output: Any) -> None:
        number, steps, drafting = self._came[output.request_id]
        after, counts = self.now - self.arrivals[number].at, self._engine.counts
        self.first.setdefault(number, after)
        if output.finished:
            self.served[number] = Served(
                self.first[number], after, self.arrivals[number].tokens, counts["steps"] - steps,
                counts["drafting"] - drafting, self.engine[number],
            )  # fmt: skip


def open_loop(options: OpenLoopOptions) -> list[Results]:
    """Let every contender serve the same requests at every temperature and rate; further runs add other requests.

    Returns:
        The run of each temperature.

    Raises:
        BenchError, HeadsError, TrainingError: on input that does not fit, or if the base does not start.
        Stopped: on Ctrl-C.
    """
    base, control, *others = contenders(options)
    if not others:
        raise BenchError("nobody is compared with vLLM alone; give heads folders with --heads")
    everyone = [base, *others, control]  # vLLM alone first and last: who starts first finds other memory
    restart_for_engines()
    texts = Texts(options)
    runs = all_runs(options, everyone)
    loads = {
        Load(run.temperature, load.rate): results
        for run, results in zip(options.runs, runs, strict=True)
        for load in options.loads
    }
    _Serving(options, loads, texts).measure(everyone)
    return runs


class _Serving(Session[Replica, Load]):
    """Engines of this process, all alive at once."""

    options: OpenLoopOptions

    def __init__(self, options: OpenLoopOptions, loads: dict[Load, Results], texts: Texts) -> None:
        super().__init__(options, loads)
        self.texts = texts

    def start(self, contender: Contender, log: Path) -> Replica:
        share_weights()
        arguments = {**self.options.engine_arguments, "max_num_seqs": self.options.most}
        return Replica(Engine(contender, {"model": self.options.model, "enable_prefix_caching": False, **arguments}))

    def room(self, facts: dict[str, Any]) -> int:
        return sys.maxsize

    def warm_up(self, one: Replica, load: Load) -> None:
        few = self.options.model_copy(update={"requests": self.options.warm_up})
        serve([one], draw(self.texts, few, load.rate, 2 * self._before(load)), load.temperature, self.options.steps)

    def round(self, load: Load, number: int) -> Iterator[Turn]:
        """All requests of a round, served by everyone."""
        number += self._before(load)
        arrivals = draw(self.texts, self.options, load.rate, 2 * number + 1)
        steps = self.options.steps
        found = undisturbed(
            self.options.most_stolen, lambda: serve(self.alive, arrivals, load.temperature, steps, number)
        )
        for name, served in (found or {}).items():
            yield {"contender": name, "rate": load.rate, "requests": served}

    def _before(self, load: Load) -> int:
        return self.loads[load].rounds_before(rate=load.rate)


def serve(
    replicas: list[Replica], arrivals: list[Arrival], temperature: float, steps: int, first: int = 0
) -> dict[str, list[Served]]:
    """Let all replicas serve the requests, in turns of so many steps, the first-th replica at first."""
    for one in replicas:
        one.begin(arrivals, temperature)
    while not all(one.done for one in replicas):
        for i in range(len(replicas)):
            replicas[(first + i) % len(replicas)].turn(steps)
        first += 1
    return {one.name: [one.served[i] for i in range(len(arrivals))] for one in replicas}


def draw(texts: Texts, options: OpenLoopOptions, rate: float | None, seed: int) -> list[Arrival]:
    """Requests of the lengths of `ppd bench serve`, in the order in which they come."""
    rng = np.random.default_rng([options.seed, seed])
    lengths = draw_lengths(options, rng)
    gaps = np.zeros(options.requests) if rate is None else rng.exponential(1 / rate, options.requests)
    alike = texts.piece(rng, options.shared_tokens)
    return [
        Arrival(float(at), alike[:shared] + texts.piece(rng, int(prompt - shared)), int(answer))
        for at, prompt, answer, shared in zip(np.cumsum(gaps), *lengths, strict=True)
    ]

# SPDX-License-Identifier: Apache-2.0
"""`ppd bench serve`: which server is under which load when, and what its turns come to."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from vllm_ppd.benchmarks.harness.contenders import Contender, contenders
from vllm_ppd.benchmarks.harness.estimates import quartiles
from vllm_ppd.benchmarks.harness.results import Measured, Results, Row, Turn, paired
from vllm_ppd.benchmarks.harness.session import OneByOne
from vllm_ppd.benchmarks.serve.chats import Chats
from vllm_ppd.benchmarks.serve.generator import COUNTERS, TIMES, send
from vllm_ppd.benchmarks.serve.options import Load, ServeOptions
from vllm_ppd.benchmarks.serve.server import Server
from vllm_ppd.benchmarks.serve.workload import Texts

WARM_UP_REQUESTS = 3


def run(options: ServeOptions) -> str:
    """Measure; the table."""
    from vllm_ppd.benchmarks.serve.table import table

    return table(serve(options))


def serve(options: ServeOptions) -> Results:
    """Measure every contender's server under every load, and keep each turn in options.out.

    Raises:
        BenchError, HeadsError, TrainingError: on input that does not fit, or if the base does not start.
        Stopped: on Ctrl-C.
    """
    everyone = contenders(options)
    texts = Chats(options) if options.chats else Texts(options)
    results = Results(options, everyone)
    _Serving(options, results, texts).measure(everyone)
    return results


class _Serving(OneByOne[Server, Load]):
    """Servers under a load."""

    def __init__(self, options: ServeOptions, results: Results, texts: Texts) -> None:
        super().__init__(options, dict.fromkeys(options.loads, results))
        self.model, self.temperature, self.arguments = options.model, options.temperature, options.engine_arguments
        self.texts = texts
        self.run = len(results.earlier)  # a further run draws further requests

    def start(self, contender: Contender, log: Path) -> Server:
        return Server(contender, self.model, self.arguments, log)

    def warm_up(self, one: Server, load: Load) -> None:
        """A few requests by themselves, of texts that no turn has, once a server has started."""
        if load != next(iter(self.loads)):
            return
        for prompt, _ in self.texts.requests(0, self.run)[:WARM_UP_REQUESTS]:
            one.complete(prompt, self.texts.options.new_tokens, self.temperature)

    def turn(self, one: Server, load: Load, number: int) -> Turn:
        seed = (1, self.run, list(self.loads).index(load), number)
        return send(one, self.texts.requests(*seed), load, self.temperature, number)


def load_rows(measured: Measured) -> list[Row]:
    """A row a load and contender: rates first, then numbers at once."""
    loads = sorted((Load(*found) for found in measured.places("rate", "concurrency")), key=_order)
    found = (summarise(measured, name, load) for load in loads for name in measured.contenders)
    return [row for row in found if row is not None]


def _order(load: Load) -> tuple[bool, float, float]:
    return load.concurrency is not None, load.rate or float("inf"), load.concurrency or 0


def summarise(measured: Measured, name: str, load: Load) -> Row | None:
    """Medians over turns, medians and quartiles of ratios to the base's turn of the same round.

    Returns:
        contender, load, turns, failed requests; {ttft,tpot,itl,e2el}: (p50, p95) in milliseconds; requests_per_second,
        tokens_per_second; faster_{ttft,tpot,e2el} and faster_tokens: (median, lower, upper quartile), above 1 where the
        contender is better; length, rate, prefix_hits: of all turns together, None where they are not known.
    """
    pairs = paired(measured.runs_of(name), name, load._asdict())
    if not pairs:
        return None
    turns = [turn for turn, _ in pairs]

    def median(value: Callable[[Turn], float]) -> float:
        return statistics.median(map(value, turns))

    sums = {key: _sum([turn[key] for turn in turns]) for key in COUNTERS}
    return {
        "contender": name, "load": load, "turns": len(turns), "failed": sum(turn["failed"] for turn in turns),
        **{time: tuple(median(lambda turn, t=time, p=p: turn[f"{t}_ms"][p]) for p in ("p50", "p95"))  # type: ignore[misc]
           for time in TIMES},
        "requests_per_second": median(lambda turn: turn["requests_per_second"]),
        "tokens_per_second": median(lambda turn: turn["tokens_per_second"]),
        **{f"faster_{time}": quartiles([base[f"{time}_ms"]["p50"] / turn[f"{time}_ms"]["p50"]
                                        for turn, base in pairs])
           for time in ("ttft", "tpot", "e2el")},
        "faster_tokens": quartiles([turn["tokens_per_second"] / base["tokens_per_second"] for turn, base in pairs]),
        "length": _ratio(sums["accepted_tokens"], sums["drafts"], 1.0),
        "rate": _ratio(sums["accepted_tokens"], sums["draft_tokens"]),
        "prefix_hits": _ratio(sums["prefix_hits"], sums["prefix_queries"]),
    }  # fmt: skip


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _ratio(part: int | None, whole: int | None, more: float = 0.0) -> float | None:
    return more + part / whole if part is not None and whole else None

# SPDX-License-Identifier: Apache-2.0
"""The open loop: requests that arrive at engines with clocks of their own, and what they come to."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL
from vllm_ppd.benchmarks.harness.results import Measured
from vllm_ppd.benchmarks.serve import open_loop
from vllm_ppd.benchmarks.serve.open_loop import Arrival, Replica, Served, draw, serve
from vllm_ppd.benchmarks.serve.open_loop_table import rows_of
from vllm_ppd.benchmarks.serve.options import OpenLoopOptions
from vllm_ppd.benchmarks.serve.workload import Texts


class OneTokenAStep:
    """An engine whose steps take so many seconds and give each request a token."""

    def __init__(self, name: str, clock: list[float], seconds: float) -> None:
        self.name, self.clock, self.seconds = name, clock, seconds
        self.left: dict[str, int] = {}
        self.facts: dict[str, int] = {}
        self.counts = {"steps": 0, "drafting": 0}

    def close(self) -> None: ...

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def add(self, name: str, prompt: list[int], tokens: int, temperature: float) -> None:
        self.left[name] = tokens

    def step(self) -> list[Any]:
        self.counts["steps"] += 1
        self.clock[0] += self.seconds
        self.left = {name: tokens - 1 for name, tokens in self.left.items()}
        outputs = [SimpleNamespace(request_id=name, finished=tokens == 0) for name, tokens in self.left.items()]
        self.left = {name: tokens for name, tokens in self.left.items() if tokens}
        return outputs


def test_each_engine_has_a_clock_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second engine takes half as long: it is idle for longer, and serves nothing before it comes."""
    clock = [0.0]
    monkeypatch.setattr(open_loop.time, "perf_counter", lambda: clock[0])
    engines: Any = [OneTokenAStep(name, clock, seconds) for name, seconds in (("slow", 1.0), ("fast", 0.5))]
    coming = [Arrival(0.0, [1], 3), Arrival(1.5, [1], 2), Arrival(10.0, [1], 1)]
    found = serve([Replica(engine) for engine in engines], coming, 0.0, 2)
    # The second request comes within a step, and waits for its end.
    # Of the step that both are in, the second has the half that falls to the token of its prompt.
    assert found["slow"] == [
        Served(1.0, 3.0, 3, 3, 0, 2.5),
        Served(1.5, 2.5, 2, 2, 0, 1.5),
        Served(1.0, 1.0, 1, 1, 0, 1.0),
    ]
    assert found["fast"] == [
        Served(0.5, 1.5, 3, 3, 0, 1.5),
        Served(0.5, 1.0, 2, 2, 0, 1.0),
        Served(0.5, 0.5, 1, 1, 0, 0.5),
    ]


def test_the_same_requests_arrive_at_every_rate() -> None:
    texts = Texts.__new__(Texts)  # without a tokenizer
    texts.stream = list(range(5000))
    options = OpenLoopOptions(model="m", data=("d",), requests=400, rates=(1.0, 4.0, math.inf))
    slow, fast, at_once = (draw(texts, options, load.rate, 1) for load in options.loads)
    assert [one.tokens for one in slow] == [one.tokens for one in fast] == [one.tokens for one in at_once]
    assert slow[-1].at == pytest.approx(4 * fast[-1].at)
    assert 300 < slow[-1].at < 500
    assert {one.at for one in at_once} == {0.0}
    assert slow[0] != draw(texts, options, 1.0, 2)[0]


def test_a_step_is_divided_by_the_tokens_that_it_took_in() -> None:
    """What a part of a prompt took falls to those of the next step, and all of it to somebody."""
    engine: Any = OneTokenAStep("one", [0.0], 1.0)
    replica = Replica(engine)
    replica.begin([Arrival(0.0, [1] * 9, 3), Arrival(0.0, [1] * 30, 3)], 0.0)
    replica.divide(1.0, [])
    replica.divide(1.0, [0])
    replica.first[0] = 2.0
    replica.divide(31.0, [0, 1])
    assert replica.engine == [3.0, 30.0]


def test_ratios_are_to_both_of_vllms_engines() -> None:
    served = {
        BASE: [Served(1.0, 3.0, 3, 10, 0, 1.0), Served(1.0, 5.0, 5, 10, 0, 2.0)],
        CONTROL: [Served(1.0, 5.0, 3, 10, 0, 1.0), Served(1.0, 7.0, 5, 10, 0, 2.0)],
        "cp": [Served(2.0, 4.0, 3, 10, 4, 1.0), Served(2.0, 4.0, 5, 10, 6, 3.0)],
    }

    def run(temperature: float, *rates: float | None) -> Measured:
        turns = [{"contender": name, "rate": rate, "requests": own} for rate in rates for name, own in served.items()]
        found = {"options": {"temperature": temperature}, "contenders": {name: {} for name in served}, "turns": turns}
        return Measured(found, [], found["contenders"])

    *_, cp, base, control, over_all = rows_of([run(0.8, 1.0)])
    assert (cp["temperature"], cp["rate"], cp["requests"], cp["drafting"]) == (0.8, "1", 2, 0.5)
    assert (cp["latency"], cp["TTFT"], cp["TPOT"]) == (10 / 8, 0.5, round((1.5 + 1.25) / 1.5, 3))
    assert (cp["engine"], cp["engine, interval"]) == (0.75, "0.667-1.000")
    assert cp["latency, interval"] == "1.000-1.500"  # either request twice
    assert (base["latency"], control["latency"]) == (1.25, 0.833)
    assert {name: over_all[name] for name in ("latency", "TTFT")} == {"latency": 1.25, "TTFT": 0.5}
    found = rows_of([run(0.8, 1.0, None), run(0.0, 1.0)])
    several = [row for row in found if "all" in (row["temperature"], row["rate"]) and row["contender"] == "cp"]
    assert [(row["temperature"], row["rate"], row["requests"], row["TTFT"]) for row in several] == [
        ("all", "1", 4, 0.5), (0.8, "all", 4, 0.5), ("all", "all", 6, 0.5),
    ]  # fmt: skip

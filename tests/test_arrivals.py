# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/arrivals.py makes of requests that arrive, and that the kept rows are those of the kept requests."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import arrivals
from arrivals import Arrival, Replica, Served, draw, rows, serve
from side_by_side import BASE, CONTROL, Contender

from vllm_ppd.vllm_plugins.bench.serve_options import ServeOptions


class OneTokenAStep:
    """An engine whose steps take so many seconds and give each request a token."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.left: dict[str, int] = {}

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.left[name] = params.max_tokens

    def step(self) -> list[Any]:
        self.clock[0] += self.seconds
        self.left = {name: tokens - 1 for name, tokens in self.left.items()}
        outputs = [SimpleNamespace(request_id=name, finished=tokens == 0) for name, tokens in self.left.items()]
        self.left = {name: tokens for name, tokens in self.left.items() if tokens}
        return outputs


def test_each_engine_has_a_clock_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second engine takes half as long: it is idle for longer, and serves nothing before it comes."""
    clock = [0.0]
    monkeypatch.setattr(arrivals.time, "perf_counter", lambda: clock[0])
    replicas = {}
    for name, seconds in (("slow", 1.0), ("fast", 0.5)):
        contender = Contender.__new__(Contender)  # without an engine of vLLM's
        contender.adaptive, contender.always = None, False
        contender.llm = SimpleNamespace(llm_engine=OneTokenAStep(clock, seconds))
        replicas[name] = Replica(contender)
    coming = [Arrival(0.0, [1], 3), Arrival(1.5, [1], 2), Arrival(10.0, [1], 1)]
    progress = SimpleNamespace(update=lambda count: None)
    found = serve(replicas, coming, 0.0, 2, progress)
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
    texts: Any = SimpleNamespace(stream=list(range(5000)))
    options = ServeOptions(model="m", data=("d",), requests=400)
    slow, fast, at_once = (draw(texts, options, rate, 1) for rate in (1.0, 4.0, math.inf))
    assert [one.tokens for one in slow] == [one.tokens for one in fast] == [one.tokens for one in at_once]
    assert slow[-1].at == pytest.approx(4 * fast[-1].at)
    assert 300 < slow[-1].at < 500
    assert {one.at for one in at_once} == {0.0}
    assert slow[0] != draw(texts, options, 1.0, 2)[0]


def test_a_step_is_divided_by_the_tokens_that_it_took_in() -> None:
    """What a part of a prompt took falls to those of the next step, and all of it to somebody."""
    replica = Replica(Contender.__new__(Contender))
    replica.begin([Arrival(0.0, [1] * 9, 3), Arrival(0.0, [1] * 30, 3)], 0.0)
    replica._divide(1.0, [])
    replica._divide(1.0, [0])
    replica.first[0] = 2.0
    replica._divide(31.0, [0, 1])
    assert replica.engine == [3.0, 30.0]


def test_ratios_are_to_both_of_vllms_engines() -> None:
    cells = {
        "0.8/1": {
            BASE: [Served(1.0, 3.0, 3, 10, 0, 1.0), Served(1.0, 5.0, 5, 10, 0, 2.0)],
            CONTROL: [Served(1.0, 5.0, 3, 10, 0, 1.0), Served(1.0, 7.0, 5, 10, 0, 2.0)],
            "cp": [Served(2.0, 4.0, 3, 10, 4, 1.0), Served(2.0, 4.0, 5, 10, 6, 3.0)],
        }
    }
    *_, cp, base, control, over_all = rows(cells)
    assert (cp["temperature"], cp["rate"], cp["requests"], cp["drafting"]) == (0.8, "1", 2, 0.5)
    assert (cp["latency"], cp["TTFT"], cp["TPOT"]) == (10 / 8, 0.5, round((1.5 + 1.25) / 1.5, 3))
    assert (cp["engine"], cp["engine, interval"]) == (0.75, "0.667-1.000")
    assert cp["latency, interval"] == "1.000-1.500"  # either request twice
    assert (base["latency"], control["latency"]) == (1.25, 0.833)
    assert {name: over_all[name] for name in ("latency", "TTFT")} == {"latency": 1.25, "TTFT": 0.5}
    twice = {"0.8/1": cells["0.8/1"], "0.0/1": cells["0.8/1"], "0.8/inf": cells["0.8/1"]}
    several = [row for row in rows(twice) if "all" in (row["temperature"], row["rate"]) and row["contender"] == "cp"]
    assert [(row["temperature"], row["rate"], row["requests"], row["TTFT"]) for row in several] == [
        ("all", "1", 4, 0.5), (0.8, "all", 4, 0.5), ("all", "all", 6, 0.5),
    ]  # fmt: skip


def test_kept_rows() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "arrivals.json").read_text())
    assert rows(kept["cells"]) == kept["rows"]

# SPDX-License-Identifier: Apache-2.0
"""Whether requests that arrive at some rate wait longer with heads than with vLLM alone, at any rate.

    python benchmarks/arrivals.py --model build/inflated/model --heads build/inflated/heads/* \\
        --data build/corpus/validation.jsonl --out benchmarks/results/arrivals.json

Servers that `ppd bench serve` measures one after another differ by more than a few per cent where the machine's speed
drifts. Here engines of one process take turns of a few steps (side_by_side.py), and each has a clock of its own, which
stands still while others compute, and goes on to the next arrival where nothing is to do. On every clock the same
requests arrive: Poisson arrivals at each --rate (inf: all at once), with the lengths and texts of `ppd bench serve`.
Nothing is sent over a network, and texts are not put into words.

Heads draft as a server would let them (adaptive), trials included; what they learn from the --warm-up requests before
those that count is not counted. A ratio is how many times as long vLLM alone takes (the mean of its two engines) for
the same requests: "latency" from arrival to last token, "TPOT" for each token after the first, "TTFT" up to the first,
"engine" for the seconds that the engine computed, a step's divided among its requests by the tokens that it took in of
each. All are summed over requests, with the intervals in which they lie at 90 % (bootstrap over requests; the machine's
speed in the few turns that take in prompts which come all at once is not in them, but --rounds differ in it).

Waiting is chance: an engine that is a millisecond later takes a prompt in with the next one, for which everybody waits.
Of as few requests as a minute brings, vLLM's own two engines differ by several per cent in latency and TTFT for it, and
by one in the seconds that they compute.

"drafting" is the share of steps with drafts, each counted for every request in it. The last rows are of several cells,
those of a rate, those of a temperature, and all: geometric means.

A cell is written as soon as it is over; a further run on the same commit with the same settings adds other requests.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from side_by_side import (
    BASE,
    CONTROL,
    RESAMPLES,
    Contender,
    begun,
    flags,
    interval,
    joined,
    mean_ratio,
    started,
    undisturbed,
    with_huge_pages,
)
from tqdm import tqdm

from vllm_ppd.heads.checkpoint import write_text
from vllm_ppd.vllm_plugins.bench.serve_options import ServeOptions
from vllm_ppd.vllm_plugins.bench.workload import Texts, draw_lengths


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

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.runs = 0

    def begin(self, arrivals: list[Arrival], temperature: float) -> None:
        """Set the clock to 0; the engine has nothing left to do."""
        self.runs += 1
        self.now, self.steps, self.drafting = 0.0, 0, 0
        self.arrivals, self.temperature = arrivals, temperature
        self.waiting = deque(range(len(arrivals)))
        self.came: dict[str, tuple[int, int, int]] = {}  # which it is; steps, and those with drafts, before it
        self.first: dict[int, float] = {}
        self.engine = [0.0] * len(arrivals)
        self._undivided = 0.0  # seconds of steps that nobody had a token of
        self.served: dict[int, Served] = {}

    @property
    def done(self) -> bool:
        return len(self.served) == len(self.arrivals)

    def turn(self, steps: int) -> None:
        """So many steps, or fewer where no request is left."""
        engine = self.contender.llm.llm_engine
        for _ in range(steps):
            if self.done:
                return
            if not engine.has_unfinished_requests():
                self.now = max(self.now, self.arrivals[self.waiting[0]].at)
            drafting = self.contender.drafting
            started = time.perf_counter()
            while self.waiting and self.arrivals[self.waiting[0]].at <= self.now:
                self._add(self.waiting.popleft())
            outputs = engine.step()
            took = time.perf_counter() - started
            self.now += took
            self.steps, self.drafting = self.steps + 1, self.drafting + drafting
            self._divide(took, [self.came[output.request_id][0] for output in outputs])
            for output in outputs:
                self._note(output)

    def _add(self, number: int) -> None:
        arrival, name = self.arrivals[number], f"{self.runs}-{number}"
        self.came[name] = (number, self.steps, self.drafting)
        self.contender.add(name, arrival.prompt, self.temperature, arrival.tokens)

    def _divide(self, seconds: float, numbers: list[int]) -> None:
        """A step of these requests took so long."""
        self._undivided += seconds
        if not numbers:
            return
        tokens = [1 if i in self.first else len(self.arrivals[i].prompt) for i in numbers]
        for i, own in zip(numbers, tokens, strict=True):
            self.engine[i] += self._undivided * own / sum(tokens)
        self._undivided = 0.0

    def _note(self, output: Any) -> None:
        number, steps, drafting = self.came[output.request_id]
        after = self.now - self.arrivals[number].at
        self.first.setdefault(number, after)
        if output.finished:
            tokens = self.arrivals[number].tokens
            self.served[number] = Served(
                self.first[number], after, tokens, self.steps - steps, self.drafting - drafting,
                self.engine[number],
            )  # fmt: skip


def serve(replicas: dict[str, Replica], arrivals: list[Arrival], temperature: float, steps: int, progress: Any,
          first: int = 0) -> dict[str, list[Served]]:  # fmt: skip
    """Let all replicas serve the requests, in turns of so many steps, the first-th replica at first."""
    for one in replicas.values():
        one.begin(arrivals, temperature)
    names, turns = list(replicas), 0
    while not all(one.done for one in replicas.values()):
        for i in range(len(names)):
            one = replicas[names[(first + turns + i) % len(names)]]
            before = len(one.served)
            one.turn(steps)
            progress.update(len(one.served) - before)
        turns += 1
    return {name: [one.served[i] for i in range(len(arrivals))] for name, one in replicas.items()}


def draw(texts: Texts, options: ServeOptions, rate: float, seed: int) -> list[Arrival]:
    """Requests of the lengths of `ppd bench serve`, in the order in which they come."""
    rng = np.random.default_rng([options.seed, seed])
    lengths = draw_lengths(options, rng)
    gaps = np.zeros(options.requests) if math.isinf(rate) else rng.exponential(1 / rate, options.requests)

    def piece(length: int) -> list[int]:
        start = int(rng.integers(len(texts.stream) - length))
        return texts.stream[start : start + length]

    alike = piece(options.shared_tokens)
    return [
        Arrival(float(at), alike[:shared] + piece(int(prompt - shared)), int(answer))
        for at, prompt, answer, shared in zip(np.cumsum(gaps), *lengths, strict=True)
    ]


def rows(cells: dict[str, dict[str, list[Served]]]) -> list[dict[str, Any]]:
    """The table: a row a cell and contender, and then those of several cells."""
    result: list[dict[str, Any]] = []
    rows_of: dict[tuple[str, str], dict[str, Any]] = {}
    drawn: dict[tuple[str, str, str], np.ndarray] = {}
    generator = np.random.default_rng(0)  # one for all: cells that drew the same requests would vary together
    for cell, served in cells.items():
        temperature, rate = cell.split("/")
        found = {name: seconds(own) for name, own in served.items()}
        chosen = generator.integers(len(served[BASE]), size=(RESAMPLES, len(served[BASE])))
        for name, own in served.items():
            row = {"temperature": float(temperature), "rate": rate, "contender": name, "requests": len(own)}
            for what, mine in found[name].items():
                plain = (found[BASE][what] + found[CONTROL][what]) / 2
                samples = plain[chosen].sum(axis=1) / mine[chosen].sum(axis=1)
                drawn[cell, name, what] = samples
                row |= {what: round(float(plain.sum() / mine.sum()), 3), f"{what}, interval": interval(samples)}
            latency, tokens, steps, drafting = np.array(own)[:, 1:5].T
            row["tokens a second of each"] = round(float(tokens.sum() / latency.sum()), 1)
            rows_of[cell, name] = row | {"drafting": round(float(drafting.sum() / steps.sum()), 2)}
            result.append(rows_of[cell, name])
    for temperature, rate, several in joined(list(cells)):
        for name, own in cells[several[0]].items():
            own_rows = [rows_of[cell, name] for cell in several]
            requests = sum(row["requests"] for row in own_rows)
            row = {"temperature": temperature, "rate": rate, "contender": name, "requests": requests}
            for what in seconds(own):
                ratios, samples = [row[what] for row in own_rows], [drawn[cell, name, what] for cell in several]
                row[what], row[f"{what}, interval"] = mean_ratio(ratios, samples)
            drafting = statistics.mean(row["drafting"] for row in own_rows)
            result.append(row | {"tokens a second of each": "", "drafting": round(drafting, 2)})
    return result


def seconds(served: list[Served]) -> dict[str, np.ndarray]:
    """[requests] by what they are of."""
    first, latency, tokens, *_, engine = np.array(served).T
    each = (latency - first) / np.maximum(tokens - 1, 1)
    return {"latency": latency, "TPOT": each, "TTFT": first, "engine": engine}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8, 0.0, 1.0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 2, 4, math.inf], help="requests a second")
    parser.add_argument("--requests", type=int, default=48, help="of each rate and temperature")
    parser.add_argument("--rounds", type=int, default=2, help="of so many requests, each begun by another engine")
    parser.add_argument("--warm-up", type=int, default=16, help="requests before those")
    parser.add_argument("--most", type=int, default=32, help="requests that an engine decodes at once")
    parser.add_argument("--new-tokens", type=int, default=64, help="median of a request")
    parser.add_argument("--prompt-tokens", type=int, default=96, help="median of a request")
    parser.add_argument("--kv-cache-gib", type=float, default=0.6, help="of each engine")
    parser.add_argument("--out", type=Path, default=Path("arrivals.json"))
    args = parser.parse_args()
    with_huge_pages()
    result = begun("arrivals", args, apart=("temperatures", "rates", "rounds"))
    options = {
        count: ServeOptions(
            model=str(args.model), data=tuple(args.data), requests=count,
            new_tokens=args.new_tokens, prompt_tokens=args.prompt_tokens,
        )
        for count in (args.warm_up, args.requests)
    }  # fmt: skip
    texts = Texts(options[args.requests])
    heads = {Path(folder).name: {"model": folder} for folder in args.heads}
    context = options[args.requests].context
    # vLLM alone before and after the others: see started.
    replicas = started([BASE, CONTROL, *heads], [BASE, *heads, CONTROL],
                       lambda name: Replica(Contender(args, args.most, heads.get(name), context)))  # fmt: skip
    total = len(replicas) * (args.warm_up + args.rounds * args.requests) * len(args.temperatures) * len(args.rates)
    try:
        with tqdm(total=total, desc="requests", mininterval=5) as progress:
            for temperature in args.temperatures:
                for rate in args.rates:
                    for number in range(args.rounds):
                        cell = result["cells"].get(f"{temperature}/{rate:g}", {})
                        seed = 2 * (before := len(cell.get(BASE, ())) // args.requests)
                        if number == 0:
                            arrivals = draw(texts, options[args.warm_up], rate, seed)
                            serve(replicas, arrivals, temperature, args.steps, progress)
                        arrivals = draw(texts, options[args.requests], rate, seed + 1)
                        run = partial(serve, replicas, arrivals, temperature, args.steps, progress, before)
                        if (served := undisturbed(args.most_stolen, run)) is None:
                            continue
                        result["cells"][f"{temperature}/{rate:g}"] = {
                            name: [*cell.get(name, []), *own] for name, own in served.items()
                        }
                        result["rows"] = rows(result["cells"])
                        write_text(args.out, json.dumps(result, indent=1) + "\n")
    except KeyboardInterrupt:
        print(f"stopped; what was measured is kept in {args.out}, the same command adds to it")
    for row in result["rows"]:
        print(*row.values(), sep="\t")


if __name__ == "__main__":
    main()

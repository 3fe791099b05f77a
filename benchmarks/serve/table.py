# SPDX-License-Identifier: Apache-2.0
"""The summary of turns of `ppd bench serve`, and its table."""

import statistics
from collections.abc import Callable

from vllm_ppd.benchmarks.harness.estimates import cells, number, quartiles, with_quartiles
from vllm_ppd.benchmarks.harness.results import Measured, Row
from vllm_ppd.benchmarks.serve.options import Load

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
}
TIMES = ("ttft", "tpot", "itl", "e2el")
FASTER = ("ttft", "tpot", "e2el")
COLUMNS: dict[str, Callable[[Row], str]] = {
    "load": lambda row: str(row["load"]),
    "contender": lambda row: str(row["contender"]),
    "TTFT ms": lambda row: "{:.1f} / {:.1f}".format(*row["ttft"]),
    "TPOT ms": lambda row: "{:.1f} / {:.1f}".format(*row["tpot"]),
    "ITL ms": lambda row: "{:.1f} / {:.1f}".format(*row["itl"]),
    "latency ms": lambda row: "{:.1f} / {:.1f}".format(*row["e2el"]),
    "requests/s": lambda row: f"{row['requests_per_second']:.2f}",
    "tokens/s": lambda row: f"{row['tokens_per_second']:.1f}",
    "TTFT x (quartiles)": lambda row: with_quartiles(row["faster_ttft"], 3),
    "TPOT x (quartiles)": lambda row: with_quartiles(row["faster_tpot"], 3),
    "latency x (quartiles)": lambda row: with_quartiles(row["faster_e2el"], 3),
    "tokens/s x (quartiles)": lambda row: with_quartiles(row["faster_tokens"], 3),
    "length": lambda row: number(row["length"], "{:.2f}"),
    "rate": lambda row: number(row["rate"], "{:.3f}"),
    "start s": lambda row: number(row["start_seconds"], "{:.0f}"),
    "memory MB": lambda row: number(row["start_memory"], "{:.0f}"),
    "prefix hits": lambda row: number(row["prefix_hits"], "{:.1%}"),
}

LEGEND = """\
load: requests that come at random at a mean rate, or all at once, or so many at once, the next when one ends.
TTFT, TPOT, ITL, latency: to the first token, a token after it, between messages, whole; median / 95th percentile of a
turn's requests as `vllm bench serve` computes them, the median of the turns. A message holds all tokens of a step.
x: how many times better than vLLM without speculation in the same round, by the requests' medians; above 1 is better.
tokens/s: generated, of all requests together; at a rate that is kept up with, as many as are asked for.
length, rate: 1 + accepted / drafts, accepted / drafted tokens, by vLLM's counters (chain drafts, bonus token included).
start, memory: until the server answered, and the most that its processes held then; medians of its starts.
prefix hits: share of the prompts' tokens that were in the prefix cache."""


def rows_of(measured: Measured) -> list[Row]:
    """A row per load and contender: rates first, then concurrencies."""
    loads = sorted((Load(*place) for place in measured.places("rate", "concurrency")), key=_order)
    rows = (summarise(measured, name, load) for load in loads for name in measured.contenders)
    return [row for row in rows if row is not None]


def _order(load: Load) -> tuple[bool, float, float]:
    return load.concurrency is not None, load.rate or float("inf"), load.concurrency or 0


def summarise(measured: Measured, name: str, load: Load) -> Row | None:
    """Medians over turns, medians and quartiles of ratios to the base's turn of the same round.

    Returns:
        contender, load, turns, failed requests; {ttft,tpot,itl,e2el}: (p50, p95) in milliseconds; requests_per_second,
        tokens_per_second; faster_{ttft,tpot,e2el} and faster_tokens: (median, lower, upper quartile), above 1 where the
        contender is better; length, rate, prefix_hits: of all turns together, None where they are not known.
    """
    beside = measured.paired(name, **load._asdict())
    if not beside:
        return None
    turns = [turn for turn, _ in beside]

    def median(name: str, percentile: str | None = None) -> float:
        return statistics.median(turn[name] if percentile is None else turn[name][percentile] for turn in turns)

    def faster(time: str) -> tuple[float, float, float]:
        return quartiles([base[f"{time}_ms"]["p50"] / turn[f"{time}_ms"]["p50"] for turn, base in beside])

    starts = [run["starts"][name] for run in measured.runs_of(name) if name in run.get("starts", {})]
    sums = {key: _sum([turn[key] for turn in turns]) for key in COUNTERS}
    accepted = _ratio(sums["accepted_tokens"], sums["drafts"])
    return {
        "contender": name, "load": load, "turns": len(turns), "failed": sum(turn["failed"] for turn in turns),
        **{time: (median(f"{time}_ms", "p50"), median(f"{time}_ms", "p95")) for time in TIMES},
        "requests_per_second": median("requests_per_second"),
        "tokens_per_second": median("tokens_per_second"),
        **{f"faster_{time}": faster(time) for time in FASTER},
        "faster_tokens": quartiles([turn["tokens_per_second"] / base["tokens_per_second"] for turn, base in beside]),
        "length": None if accepted is None else 1 + accepted,
        "rate": _ratio(sums["accepted_tokens"], sums["draft_tokens"]),
        "start_seconds": statistics.median(start["seconds"] for start in starts) if starts else None,
        "start_memory": statistics.median(start["peak_bytes"] / 1e6 for start in starts) if starts else None,
        "prefix_hits": _ratio(sums["prefix_hits"], sums["prefix_queries"]),
    }  # fmt: skip


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _ratio(share: int | None, whole: int | None) -> float | None:
    return share / whole if share is not None and whole else None


def body(measured: Measured) -> str:
    """Markdown: the table, with what was measured above it and what failed below."""
    options, rows = measured.run["options"], rows_of(measured)
    about = (
        f"{options['model']}, {options['dtype']}, temperature {options['temperature']}; {options['requests']} requests "
        f"a turn for {options['new_tokens']} tokens (median, log-normal); {measured.run['machine']}{measured.before}"
    )
    failed = [f"failed: {row['failed']} requests of {row['contender']}, {row['load']}" for row in rows if row["failed"]]
    return "\n".join([about, "", cells(rows, COLUMNS), *failed, *measured.notes])


def table(measured: Measured) -> str:
    """The same, with what the columns mean."""
    return f"{body(measured)}\n\n{LEGEND}"

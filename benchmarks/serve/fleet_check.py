# SPDX-License-Identifier: Apache-2.0
"""Hold the simulation of queues behind `ppd plan --latency` against servers that were measured.

    ppd bench serve --rates 1,2,4 --concurrencies 1,2,4,8 ... --out serve.json
    python -m vllm_ppd.benchmarks.serve.fleet_check serve.json --out fleet_check.json

How fast a request is alone and beside others is read from the turns at so many requests at once. Then the requests of
the turns at a rate arrive in the simulation, at one replica, when they did at the server, and are as long.
`ppd plan` leaves prompts out; with them, a prompt is as many further tokens as its time to the first token is worth.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ppd.benchmarks.harness.results import Measured, Turn, paired, stored, write_rows
from vllm_ppd.heads.calibration.tables import table
from vllm_ppd.heads.planning.fleet import served

COLUMNS = (
    "contender", "requests a second", "requests", "measured p50 s", "measured p95 s", "plan p50 s", "plan p95 s",
    "with prompts p50 s", "with prompts p95 s", "p50 / measured", "p95 / measured",
)  # fmt: skip


def turns_of(measured: Measured, name: str, rate: float | None, concurrency: int | None) -> list[Turn]:
    place = {"rate": rate, "concurrency": concurrency}
    return [turn for turn, _ in paired(measured.runs_of(name), name, place)]


def seconds_a_token(turns: Iterable[Turn]) -> float:
    """Median over requests: of the tokens after the first one."""
    found = [
        (latency - first) / (tokens - 1)
        for turn in turns
        for latency, first, tokens in zip(turn["latency"], turn["ttft"], turn["output_tokens"], strict=True)
        if tokens > 1
    ]
    return float(np.median(found))


def speeds(sizes: list[int], seconds: list[float], largest: int) -> np.ndarray:
    """Tokens a second of one of 1, 2, ... requests: [largest]; on a straight line between and beyond what was seen."""
    rising = np.maximum.accumulate(seconds)
    found = np.interp(np.arange(1, largest + 1), sizes, rising)
    if len(sizes) > 1 and largest > sizes[-1]:
        slope = (rising[-1] - rising[-2]) / (sizes[-1] - sizes[-2])
        found[sizes[-1] :] = rising[-1] + slope * np.arange(1, largest - sizes[-1] + 1)
    return 1 / found


def check(measured: Measured) -> list[dict[str, Any]]:
    """A row a contender and rate.

    Raises:
        SystemExit: if a contender was not measured alone, or at no rate.
    """
    loads = measured.places("rate", "concurrency")
    sizes = sorted(size for rate, size in loads if rate is None and size is not None)
    rates = sorted(rate for rate, _ in loads if rate is not None)
    if sizes[:1] != [1] or not rates:
        raise SystemExit("turns at rates and at 1 request at once are needed; run ppd bench serve with both")
    rows = []
    for name in measured.contenders:
        known = [size for size in sizes if turns_of(measured, name, None, size)]
        if known[:1] != [1]:
            continue
        alone = turns_of(measured, name, None, 1)
        seconds = [seconds_a_token(turns_of(measured, name, None, size)) for size in known]
        first = float(np.median([value for turn in alone for value in turn["ttft"]]))
        for rate in rates:
            turns = turns_of(measured, name, rate, None)
            if turns:
                rows.append({"contender": name, "requests a second": rate} | _row(turns, known, seconds, first))
    return rows


def _row(turns: list[Turn], sizes: list[int], seconds: list[float], first: float) -> dict[str, Any]:
    found: dict[str, list[float]] = {"measured": [], "plan": [], "with prompts": []}
    for turn in turns:
        order = np.argsort(turn["arrival"])
        arrival, length = np.array(turn["arrival"])[order], np.array(turn["output_tokens"], dtype=float)[order]
        speed = speeds(sizes, seconds, len(order))
        found["measured"] += turn["latency"]
        found["plan"] += served(speed, arrival, length, 1).tolist()
        found["with prompts"] += served(speed, arrival, length - 1 + first * speed[0], 1).tolist()
    row: dict[str, Any] = {"requests": len(found["measured"])}
    for name, values in found.items():
        row |= {f"{name} p{part} s": round(float(np.percentile(values, part)), 3) for part in (50, 95)}
    return row | {f"p{part} / measured": round(row[f"with prompts p{part} s"] / row[f"measured p{part} s"], 3)
                  for part in (50, 95)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="results of ppd bench serve")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    everything = stored(args.file)
    if not everything:
        raise SystemExit(f"{args.file} holds no turns; run ppd bench serve first")
    measured = everything[-1]
    rows = check(measured)
    print(table(COLUMNS, [[row[column] for column in COLUMNS] for row in rows]))
    if args.out is not None:
        facts = {"model": measured.run["options"]["model"], "settings": measured.run["options"]}
        write_rows(args.out, "fleet_check", rows, **facts)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The summary of turns of `ppd bench decode`, and its table."""

import statistics
from collections import defaultdict
from collections.abc import Callable

from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL
from vllm_ppd.benchmarks.harness.estimates import cells, number, quartiles, with_quartiles
from vllm_ppd.benchmarks.harness.results import Measured, Row, Turn

SUMS = ("drafts", "draft_tokens", "accepted_tokens", "same_tokens", "compared_tokens", "repeated_4_grams",
        "all_4_grams")  # fmt: skip
COLUMNS: dict[str, Callable[[Row], str]] = {
    "batch": lambda row: str(row["batch"]),
    "contender": lambda row: str(row["contender"]),
    "tokens/s (quartiles)": lambda row: with_quartiles(row["tokens_per_second"], 1),
    "speed-up (quartiles)": lambda row: with_quartiles(row["speed_up"], 3),
    "Theorem 4.1": lambda row: number(row["predicted"], "{:.3f}"),
    "step ms": lambda row: f"{row['step_ms']:.2f}",
    "length": lambda row: number(row["length"], "{:.2f}"),
    "rate": lambda row: number(row["rate"], "{:.3f}"),
    "same tokens": lambda row: number(row["consistency"], "{:.2%}"),
    "repeated 4-grams": lambda row: f"{row['repeated_4_grams']:.3f}",
    "verify + draft + host ms": lambda row: " + ".join(f"{ms:.2f}" for ms in row["split_ms"]) or "-",
    "memory MB": lambda row: f"{row['peak_bytes'] / 1e6:.0f}",
}

LEGEND = """\
tokens/s: of all requests together while all of them decode, without prefill and the tail of a batch.
speed-up: over vLLM without speculation in the same round.
Theorem 4.1: the speed-up that PPD's theorem predicts for a worker group from its measured match rate.
length, rate: 1 + accepted / drafts, accepted / drafted tokens, by vLLM's counters (chain drafts, bonus token included).
same tokens: greedy tokens equal to vLLM's without speculation, by position. Tokens after the first difference in a text
are counted as they are.
verify, draft, host: the worker except drafting (forward pass over base token and drafts, with DynaMo's layers, and
sampling), drafting, and the rest of the step (scheduling, output); "-" if the workers are separate processes.
memory: peak, of the GPU if there is one, otherwise of the processes with their libraries."""


def rows_of(measured: Measured) -> list[Row]:
    """A row per contender and batch size."""
    sizes = sorted(size for (size,) in measured.places("batch"))
    rows = (summarise(measured, name, size) for size in sizes for name in measured.contenders)
    return [row for row in rows if row is not None]


def summarise(measured: Measured, name: str, batch: int) -> Row | None:
    """Medians and quartiles over a contender's turns; ratios are to the base's turn of the same round."""
    beside = measured.paired(name, batch=batch)
    if not beside:
        return None
    turns = [turn for turn, _ in beside]
    sums = {key: sum(turn[key] for turn in turns) for key in SUMS}
    ours: dict[str, float] = defaultdict(float)
    for turn in turns:
        for key, value in turn.get("ours", {}).items():
            ours[key] += value
    return {
        "contender": name,
        "batch": batch,
        "turns": len(turns),
        "tokens_per_second": quartiles([_speed(turn) for turn in turns]),
        "speed_up": quartiles([_speed(turn) / _speed(base) for turn, base in beside]),
        "predicted": measured.run.get("predicted", {}).get(name, {}).get(str(batch)),
        "drafts": sums["drafts"],
        "step_ms": 1e3 * statistics.median(turn["step_seconds"] for turn in turns),
        "length": 1 + sums["accepted_tokens"] / sums["drafts"] if sums["drafts"] else _unverified_length(turns, batch),
        "rate": sums["accepted_tokens"] / sums["draft_tokens"] if sums["draft_tokens"] else None,
        "consistency": sums["same_tokens"] / sums["compared_tokens"] if sums["compared_tokens"] else None,
        "repeated_4_grams": sums["repeated_4_grams"] / sums["all_4_grams"] if sums["all_4_grams"] else 0.0,
        "split_ms": _split(turns),
        "peak_bytes": max(turn["peak_bytes"] for turn in turns),
        "ours": dict(ours),
    }


def _unverified_length(turns: list[Turn], batch: int) -> float | None:
    """Tokens per step of a request whose n-grams are emitted unverified."""
    if not any(turn.get("ours", {}).get("unverified_tokens") for turn in turns):
        return None
    return sum(turn["window_tokens"] for turn in turns) / sum(turn["steps"] for turn in turns) / batch


def _split(turns: list[Turn]) -> list[float]:
    """Milliseconds per step of verification, drafting and the host: means over steps, medians over turns.

    Empty where workers are processes of their own.
    """
    if any(turn["worker_seconds"] is None for turn in turns):
        return []
    shares = (
        (turn["worker_seconds"] - turn["draft_seconds"], turn["draft_seconds"],
         turn["window_seconds"] - turn["worker_seconds"], turn["steps"])
        for turn in turns
    )  # fmt: skip
    by_share = zip(*([1e3 * seconds / steps for seconds in split] for *split, steps in shares), strict=True)
    return list(map(statistics.median, by_share))


def _speed(turn: Turn) -> float:
    return turn["window_tokens"] / turn["window_seconds"]


def body(measured: Measured) -> str:
    """Markdown: the table, with its command above and the contenders left out below."""
    options = measured.run["options"]
    top_p = f", top-p {options['top_p']:g}" if options["temperature"] and options.get("top_p", 1) < 1 else ""
    steps = f", turns of {options['turn_steps']} steps" if options.get("turn_steps") else ""
    about = (
        f"{options['model']}, {options['dtype']}, temperature {options['temperature']}{top_p}, "
        f"{options['prompt_tokens']} + {options['new_tokens']} tokens{steps}; {measured.run['machine']}"
        f"{measured.before}"
    )
    shares = {name: share for name, share in equal_tokens(measured).items() if name != BASE}
    same = "; ".join(f"{name}: {share:.2%}" for name, share in shares.items())
    lines = [f"Greedy tokens equal to vLLM's, over all batches: {same}."] if same else []
    lines += [about_control(measured), *about_noise(measured)]
    below = ["", *(f"- {line}" for line in lines if line)] if any(lines) else []
    return "\n".join([about, "", cells(rows_of(measured), COLUMNS), *below, *measured.notes])


def equal_tokens(measured: Measured) -> dict[str, float]:
    """The share of a contender's greedy tokens, over all batches, that equal those of vLLM alone."""
    shares = {}
    for name in measured.contenders:
        turns = [turn for run in measured.runs_of(name) for turn in run["turns"] if turn["contender"] == name]
        compared = sum(turn["compared_tokens"] for turn in turns)
        if compared:
            shares[name] = sum(turn["same_tokens"] for turn in turns) / compared
    return shares


def about_control(measured: Measured) -> str:
    """A sentence on what the control shows; empty without one."""
    if CONTROL not in measured.contenders:
        return ""
    if measured.contenders[CONTROL].get("shares"):
        return f'"{CONTROL}" uses the engine of "{BASE}", so it does not show the noise between engines.'
    return f'"{CONTROL}" is a second engine of vLLM alone; its difference from 1 is noise.'


def about_noise(measured: Measured) -> list[str]:
    """A sentence for each two contenders that did the same work on one engine."""
    lines = []
    for name, identity in measured.contenders.items():
        engine_of = identity.get("shares")
        if engine_of and _always_drafted(measured, name) and _always_drafted(measured, engine_of):
            largest = max(_difference(measured, name, engine_of, size) for (size,) in measured.places("batch"))
            size = f"by up to {largest:.0%}" if largest >= 0.005 else "by less than 0.5%"
            sampled = " and other samples" if measured.run["options"]["temperature"] else ""
            lines.append(
                f'"{engine_of}" and "{name}" both drafted in every step, on the same engine: they differ {size}, '
                f"by noise{sampled}."
            )
    return lines


def _always_drafted(measured: Measured, name: str) -> bool:
    """Whether a contender's turns have at least a request's drafts per request and step."""
    turns = [turn for run in measured.runs_of(name) for turn in run["turns"] if turn["contender"] == name]
    return bool(turns) and all(turn["drafts"] >= turn["steps"] * turn["batch"] for turn in turns)


def _difference(measured: Measured, name: str, other: str, batch: int) -> float:
    """The relative difference of two contenders' median speed-ups at a batch size."""
    rows = [summarise(measured, each, batch) for each in (name, other)]
    speeds = [row["speed_up"][0] for row in rows if row is not None]
    return max(speeds) / min(speeds) - 1


def table(measured: Measured) -> str:
    """The same, with a legend of the columns."""
    return f"{body(measured)}\n\n{LEGEND}"

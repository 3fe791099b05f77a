# SPDX-License-Identifier: Apache-2.0
"""The headline claims of the four papers, with the papers' figures and ours from the stored results."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ppd.benchmarks.acceptance.run import rows_of as accepted_rows
from vllm_ppd.benchmarks.decode.table import equal_tokens, rows_of
from vllm_ppd.benchmarks.harness.results import Row, stored
from vllm_ppd.benchmarks.results.headlines import newest
from vllm_ppd.heads.in_words import table

PARTLY = "partly"
HOLDS = {True: "yes", False: "no", None: "not decided", PARTLY: PARTLY}
THEOREM_SHARE = 0.92  # share of Theorem 4.1's speed-up that `make evidence` asks of a worker group
PAPERS_SHARES = {"group, k = 1": 0.93, "group, k = 3": 0.84}  # measured against predicted latency, Tables 2 and 3
PAPERS_CONSISTENCY = 0.93  # the least share of equal tokens in ParaDecode's Table 2
EARLY, PARALLEL = "ppd early", "paradecode, parallel schedule"


class Ours(NamedTuple):
    """Our figure for a claim.

    Attributes:
        holds: None if intervals allow both; PARTLY if it holds for some batches, settings or baselines.
        why: the reason against it, or a condition.
    """

    text: str
    holds: bool | str | None
    why: str = ""


class Results:
    """The stored results, and the calibrations of SmolLM2's heads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def decoded(self, name: str, temperature: float = 0.0, batch: int | None = 1) -> dict[str, list[Row]]:
        """Rows of decoding by contender, from the newest run or from a file of rows; batch None: of every batch."""
        data = json.loads((self.folder / f"{name}.json").read_text())
        runs = [] if "rows" in data else stored(self.folder / f"{name}.json")
        runs = sorted((m for m in runs if m.run["options"]["temperature"] == temperature), key=lambda m: m.run["time"])
        rows = data["rows"] if "rows" in data else rows_of(runs[-1])
        by_name: dict[str, list[Row]] = {}
        for row in rows:
            if batch in (None, row["batch"]):
                by_name.setdefault(row["contender"], []).append(row)
        return by_name

    def accepted(self, name: str) -> dict[str, Row]:
        """The newest greedy row of accepted drafts of each contender."""
        runs = [m for m in stored(self.folder / f"{name}.json") if not m.run["options"]["temperature"]]
        return {row["contender"]: row for measured in runs for row in accepted_rows(measured)}

    @property
    def matches(self) -> dict[str, Any]:
        """Match rates of SmolLM2's early heads, as `ppd calibrate` stores them."""
        path = self.folder.parent / "smollm" / "heads" / "early" / "calibration.json"
        matches: dict[str, Any] = json.loads(path.read_text())["parts"]["matches"]
        return matches


def group_latency(results: Results) -> Ours:
    rows = {name: row for name, (row, *_) in results.decoded("group").items() if name.startswith("group")}
    ratios = ", ".join(f"{1 / row['speed_up'][0]:.2f} at {name[7:]}" for name, row in rows.items())
    parallel = results.decoded("group")["TP 2"][0]["speed_up"][0]
    slower = all(row["speed_up"][0] < parallel for row in rows.values())
    why = (
        "relative to two pipeline stages on two cores, of which one waits for the other, not to a single device; two "
        f"tensor-parallel ranks on these cores take {1 / parallel:.2f}"
    )
    holds = _above_one([row["speed_up"] for row in rows.values()])
    return Ours(ratios, PARTLY if holds and slower else holds, why)


def group_theorem(results: Results) -> Ours:
    rows = {name: row for name, (row, *_) in results.decoded("group").items() if row.get("predicted")}
    shares = {name: row["speed_up"][0] / row["predicted"] for name, row in rows.items()}
    text = ", ".join(f"{share:.2f} of {rows[name]['predicted']:.2f}x at {name[7:]}" for name, share in shares.items())
    holds = all(shares[name] >= share for name, share in PAPERS_SHARES.items())
    missed = [name[7:] for name, share in shares.items() if share < THEOREM_SHARE]
    why = "by the paper's own shares; the stages share the machine's memory"
    if missed:
        why += f"; `make evidence` asks for {THEOREM_SHARE}, which {' and '.join(missed)} misses"
    return Ours(text, holds, why)


def match_rates(results: Results) -> Ours:
    matches = results.matches
    at = len(matches["layers"]) // 2
    rates = {form: [rates[form][at] for rates in matches["match"].values()] for form in "NY"}
    untrained, trained = (", ".join(f"{rate:.0%}" for rate in rates[form]) for form in "NY")
    better = all(after > before for before, after in zip(rates["N"], rates["Y"], strict=True))
    holds = better and all(rate == sorted(rate) for rate in rates.values())
    return Ours(f"layer {matches['layers'][at]}: {untrained} and {trained} at k = {', '.join(matches['match'])}", holds)


def early_speed(results: Results) -> Ours:
    rows, early = results.decoded("paradecode")["paradecode"], results.accepted("acceptance")[EARLY]
    config = stored(results.folder / "paradecode.json")[-1].run["contenders"]["paradecode"]["speculative_config"]
    layer, measured = results.matches["layers"][0], config["exit_layer"]
    cost = early["cost"] / early["drafted"] if early["cost"] else 0.0
    at_layer = results.matches["acceptance"]["greedy"]["Y"]
    first, deeper = (at_layer[str(at)][0]["rate"] for at in (layer, measured))
    why = (
        f"even a draft at layer {layer} reads {cost:.2f} of the target's weights, including a large LM head, and is "
        f"right {first:.0%} of the time ({deeper:.0%} at layer {measured}, whose speed this is); drafting gains if "
        "the second number is larger, as for models with more and wider layers and a relatively smaller LM head, or "
        "with better heads"
    )
    text = ", ".join(f"{row['speed_up'][0]:.2f}x" for row in rows)
    return Ours(text, _above_one([row["speed_up"] for row in rows]), why)


def early_output(results: Results) -> Ours:
    row = results.accepted("acceptance")[EARLY]
    decoded = {name: rows[0]["consistency"] for name, rows in results.decoded("paradecode").items()}
    text = (
        f"float32: {row['same']} of {row['prompts']} texts; bfloat16, by token: {decoded['paradecode']:.0%} with the "
        f"deferred schedule, {decoded[PARALLEL]:.0%} with the parallel one"
    )
    share = equal_tokens(newest(stored(results.folder / "gpu_decode.json")))["early"]
    text += f", {share:.0%} with the deferred schedule on a GPU"
    equal, close = row["same"] == row["prompts"], min(share, decoded[PARALLEL]) >= PAPERS_CONSISTENCY
    why = "in float32 alone; why texts part in bfloat16 is not known"
    return Ours(text, (equal and close) or (PARTLY if equal else False), "" if close else why)


def rank(results: Results) -> Ours:
    rows = results.accepted("cp_conditions")
    low, high = (rows[f"cp none-r{rank}"]["accepted"] for rank in (1, 3))
    texts = (f"{1 + rank.value:.2f} ({1 + rank.low:.2f} to {1 + rank.high:.2f})" for rank in (low, high))
    holds = high.low > low.high or None if high.value > low.value else False
    reading = 1 + rows["cp chain-r1"]["accepted"].value
    return Ours(" and ".join(texts), holds, f"what a head reads matters more: {reading:.2f} at rank 1 with drafts")


def dynamo_speed(results: Results) -> Ours:
    texts, measured = [], []
    for place, file in (("an H200", "gpu_decode_4b"), ("two CPU cores", "smollm_decode")):
        for temperature in (0.0, 0.6):
            rows = results.decoded(file, temperature, None)["dynamo"]
            measured += [row["speed_up"] for row in rows]
            speeds = ", ".join(f"{row['speed_up'][0]:.2f}x" for row in rows)
            batches = ", ".join(str(row["batch"]) for row in rows)
            texts.append(f"{place}, {f'T {temperature:g}' if temperature else 'greedy'}: {speeds} at batch {batches}")
    gains = _above_one(measured)
    why = (
        "on a GPU in small batches, of which batch 1 is three prompts; n-grams are verified, so quality is the "
        "target's, which stays frozen, while the paper trains it and emits n-grams unverified"
    )
    return Ours("; ".join(texts), PARTLY if gains is None else gains, why)


def _above_one(speed_ups: list[Sequence[float]]) -> bool | None:
    """Whether all quartiles of speed-ups are above 1; None if only some are."""
    _, low, high = zip(*speed_ups, strict=True)
    return True if min(low) > 1 else False if max(high) < 1 else None


CLAIMS: tuple[tuple[str, str, str, Callable[[Results], Ours]], ...] = (
    ("PPD, Table 3", "Latency relative to greedy decoding", "0.91 to 0.94 at k = 1, 0.91 to 0.92 at k = 3",
     group_latency),
    ("PPD, Theorem 4.1", "Share of the theorem's speed-up reached", "0.93 at k = 1, 0.84 to 0.86 at k = 3",
     group_theorem),
    ("PPD, Table 2", "Training the classifier raises the match rate, and so does k",
     "layer 20 of 40, SQUAD: 39%, 54%, 60% and 53%, 68%, 74% at k = 1, 3, 5", match_rates),
    ("ParaDecode, Table 1", "Faster than ordinary decoding", "1.15x to 1.53x", early_speed),
    ("ParaDecode, Table 2", "The output equals that of ordinary decoding", "93% to 98% of tokens", early_output),
    ("CP heads, Table 2", "Rank 3 has more tokens accepted per step than rank 1 (including the first)",
     "1.52 and 1.64", rank),
    ("DynaMo, Table 4", "Faster at the same quality", "2.06x to 3.00x", dynamo_speed),
)  # fmt: skip


def claims(folder: Path) -> str:
    """Markdown: a row per claim."""
    results, lines = Results(folder), []
    for where, claim, theirs, measure in CLAIMS:
        ours = measure(results)
        lines.append([where, claim, theirs, ours.text, HOLDS[ours.holds], ours.why])
    return table(["paper", "claim", "the paper", "here", "holds", "why"], lines)

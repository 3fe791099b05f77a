# SPDX-License-Identifier: Apache-2.0
"""Checks of a server's answers, counters, memory and end; each fault is a line."""

import contextlib
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ppd.benchmarks.soak.client import LAST_TOKENS, Record
from vllm_ppd.benchmarks.soak.workload import Request

Answers = Mapping[int, Record]  # by index of the request
MIB = 1 << 20
DRAFTS, DRAFTED, ACCEPTED, BY_POSITION = (
    f"vllm:spec_decode_num_{what}_total"
    for what in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)
PREEMPTIONS = "vllm:num_preemptions_total"
ZERO = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "ppd:invalid_drafts_total", "ppd:unverified_tokens_total")  # fmt: skip
SMOOTHED = 5  # samples whose median is a point of the memory's growth


class Records(NamedTuple):
    """The records in a server's file.

    Attributes:
        answers: by index.
        samples: of memory, in order.
        end: of the server, including its counters; {} if it was stopped before.
    """

    answers: dict[int, Record]
    samples: list[Record]
    end: Record

    def total(self, series: str) -> int:
        """A counter of the server."""
        return int(self.end["counters"].get(series, 0))


def read(path: Path) -> Records:
    """The records of a server; a line that was cut off is left out."""
    records = Records({}, [], {})
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if "code" in record:
                records.end.update(record)
            elif "memory" in record:
                records.samples.append(record)
            else:
                records.answers[record["index"]] = record
    return records


def differ(answer: Record, other: Record) -> bool:
    """Whether two answers differ in tokens, text or end, as far as both were read."""
    if answer["hung_up"] or other["hung_up"]:
        both = min(len(answer["ids"]), len(other["ids"]))
        return bool(answer["ids"][:both] != other["ids"][:both])
    return any(answer[what] != other[what] for what in ("ids", "text", "finish"))


class Compared(NamedTuple):
    """Pairs of answers that should be equal, and the indices of those that are not."""

    pairs: int
    unlike: list[int]

    def __str__(self) -> str:
        return f"{len(self.unlike)} of {self.pairs}"


def compare(pairs: Iterable[tuple[int, int | None]], mine: Answers, theirs: Answers) -> Compared:
    """Compare two servers' answers by pairs of indices; pairs without both answers are left out."""
    both = [(index, other) for index, other in pairs if index in mine and other in theirs and other is not None]
    return Compared(len(both), [index for index, other in both if differ(mine[index], theirs[other])])


class Growth(NamedTuple):
    """MiB that memory grew in the second half of the requests, and the largest difference of samples in that half."""

    mib: float
    spread: float


def growth(records: Records) -> Growth | None:
    """The growth of the engine's processes; None if there are too few samples."""
    later = [sample["memory"] / MIB for sample in records.samples if sample["answered"] >= len(records.answers) // 2]
    if len(later) < 2 * SMOOTHED:
        return None
    grown = statistics.median(later[-SMOOTHED:]) - statistics.median(later[:SMOOTHED])
    return Growth(round(grown, 1), round(max(later) - min(later), 1))


def memory_faults(mine: Growth | None, control: Growth | None) -> list[str]:
    """A fault if memory grew more than the control's by more than the spread of the control's samples, its noise."""
    if mine is None or control is None or mine.mib <= control.mib + control.spread:
        return []
    return [f"memory grew by {mine.mib} MiB, the control's by {control.mib} (its samples differ by {control.spread})"]


def end_faults(end: Record) -> list[str]:
    """Faults in how a server ended, and what it left behind."""
    left = [f"left {what}: {', '.join(end[what])}" for what in ("processes", "shared_memory") if end[what]]
    return left + ([f"exit code {end['code']}"] if end["code"] else [])


def counter_faults(records: Records, request: Callable[[int], Request], drafts: int) -> list[str]:
    """Faults in a server's counters.

    Args:
        records: its answers and its end.
        request: by index.
        drafts: the most drafts of a request in a step; 0 without speculation.
    """
    count = defaultdict(float, records.end["counters"])
    mine = [(request(index).body, answer) for index, answer in records.answers.items()]
    received = sum(len(answer["ids"]) for _, answer in mine) + LAST_TOKENS
    # Generated and not received: after a client hung up, and behind a stop string within a step.
    unread = sum(body["max_tokens"] - len(answer["ids"]) for body, answer in mine if answer["finish"] is None)
    unread += drafts * sum(bool(body.get("stop")) for body, answer in mine if answer["finish"] == "stop")
    ended = sum(answer["finish"] is not None for _, answer in mine) + 1
    made, answered = count["vllm:generation_tokens_total"], count["vllm:request_success_total"]
    steps, drafted, accepted, placed = (count[name] for name in (DRAFTS, DRAFTED, ACCEPTED, BY_POSITION))
    hits, candidates, thrown = (
        count[f"ppd:group_{name}_total"] for name in ("hits", "candidates", "candidates_discarded")
    )
    rules = {
        f"{made:g} tokens generated, {received} received, {unread} more at most": 0 <= made - received <= unread,
        f"{answered:g} requests answered, {ended} of {len(mine) + 1} read": ended <= answered <= len(mine) + 1,
        f"{accepted:g} of {drafted:g} drafted tokens accepted": accepted <= drafted,
        f"{accepted:g} tokens accepted, {placed:g} by position": accepted == placed,
        f"{steps:g} drafts of {drafts} tokens at most, {drafted:g} in all": steps <= drafted <= drafts * steps,
        f"{candidates:g} candidates, {hits:g} hits, {thrown:g} discarded": candidates == hits + thrown,
        **{f"{name} is {count[name]:g}, not 0": not count[name] for name in ZERO},
    }
    return [text for text, holds in rules.items() if not holds]


def parting(model: str, request: Request, mine: Record, control: Record) -> str:
    """Where two answers part, the tokens' logprobs there (float32, without penalties), and how to repeat it.

    Args:
        model: folder of the target.
        request: that both answer.
        mine, control: the answers.
    """
    import torch
    from transformers import AutoModelForCausalLM

    both = mine["ids"], control["ids"]
    common = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
    target: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = target(torch.tensor([request.body["prompt"] + mine["ids"][:common]])).logits[0, -1]
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(2).values
    tokens = [f"{ids[common]} ({logprobs[ids[common]]:.6f})" if common < len(ids) else "its end" for ids in both]
    return (
        f"after {common} tokens {tokens[0]}, the control {tokens[1]}; the top two are {best[0] - best[1]:.2e} apart; "
        f"{mine['text']!r}, the control {control['text']!r}; {request.body}"
    )

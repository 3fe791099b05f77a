# SPDX-License-Identifier: Apache-2.0
"""Seconds of one forward pass over a long sequence, without a head and with CP heads of several ranks, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from vllm_ppd.heads.cp.module import CPHead
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

TURNS = 9
LONGEST = 1024  # tokens of the sequence; the paper's are of 1024 to 4096


class PassTimes(NamedTuple):
    """Median seconds."""

    tokens: int  # of the sequence
    bare: float  # the target, with its own LM head for the last token
    head: dict[str, float]  # each CP head alone, on the last hidden state
    full: dict[str, float]  # target and CP head, timed as one


@torch.no_grad()
def forward_times(target: Target, heads: Mapping[str, CPHead], autocast: Any) -> PassTimes:
    """Time everyone once a turn, so that what else the machine does falls on all alike.

    transformers' eager modules, batch 1, no KV history: the whole sequence is computed.
    """
    tokens = min(LONGEST, target.max_length or LONGEST)
    ids = torch.arange(tokens, device=target.device)[None] % target.vocab_size
    batch = Batch(ids, torch.arange(tokens, device=target.device)[None])

    def bare() -> torch.Tensor:
        last = target.run(batch).final[-1:]
        functional.linear(last.to(target.unembedding.dtype), target.unembedding, target.bias)
        return last

    def alone(head: CPHead, hidden: torch.Tensor) -> None:
        context = target.embed(ids[:, : head.positions - 1]) if head.lead else None
        head.log_weights(hidden, context)
        head.log_factors(hidden, target.unembedding, target.bias, context)

    def full(head: CPHead) -> None:
        alone(head, bare())

    with autocast():
        hidden = bare()
        calls: dict[tuple[str, str], Callable[[], Any]] = {("bare", ""): bare}
        for name, head in heads.items():
            calls["head", name] = partial(alone, head, hidden)
            calls["full", name] = partial(full, head)
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        for turn in range(TURNS + 1):
            for key, call in calls.items():
                spent = _time(call, target.device)
                if turn:  # the first one warms up
                    seconds[key].append(spent)
    median = {key: statistics.median(values) for key, values in seconds.items()}
    return PassTimes(
        tokens, median["bare", ""], *({name: median[part, name] for name in heads} for part in ("head", "full"))
    )


def _time(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started

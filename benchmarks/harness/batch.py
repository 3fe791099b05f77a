# SPDX-License-Identifier: Apache-2.0
"""Decoding one batch, step by step: what the steps take and what they make."""

from __future__ import annotations

import statistics
import time
from typing import Any

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.engine import COUNTERS, Engine, Timers
from vllm_ppd.benchmarks.harness.machine import peak_bytes
from vllm_ppd.vllm_plugins.engine.metrics import totals


class Parts(Timers):
    """Seconds of the host in the worker, and in drafting within it, since the engine started."""

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self.known = worker is not None  # not where workers are processes of their own
        if worker is None:
            return
        for name in ("execute_model", "sample_tokens"):
            self.wrap(worker, name, "worker")
        if hasattr(worker.model_runner, "propose_draft_token_ids"):
            self.wrap(worker.model_runner, "propose_draft_token_ids", "draft")

    def now(self) -> dict[str, float | None]:
        return {f"{part}_seconds": self.seconds[part] if self.known else None for part in ("worker", "draft")}


def decode_batch(
    engine: Engine,
    prompts: list[list[int]],
    new_tokens: int,
    temperature: float,
    parts: Parts,
    top_p: float = 1.0,
) -> dict[str, Any]:
    """Generate new_tokens after each prompt, and time the steps in which all of them decode.

    The window opens when every request has a token and closes when the first one ends: what is timed is decoding at the
    full batch, without prefill and without the tail in which requests that got more drafts accepted have left.

    Returns:
        window_tokens, window_seconds, steps, step_seconds (median) and the window's worker_seconds and draft_seconds;
        drafts, draft_tokens and accepted_tokens (as vLLM counts them) and ours (our counters) of the whole turn;
        token_ids [requests][tokens];
        peak_bytes so far.
    """
    before, ours = engine.counts.copy(), totals()
    ids: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for name, prompt in zip(ids, prompts, strict=True):
        engine.add(name, prompt, new_tokens, temperature, top_p)
    steps: list[float] = []
    tokens = 0
    opened = closed = parts.now()
    finished = False
    while engine.busy:
        decoding = all(ids.values()) and not finished
        started = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - started
        for output in outputs:
            ids[output.request_id] += output.outputs[0].token_ids
            tokens += len(output.outputs[0].token_ids) if decoding else 0
            finished = finished or output.finished
        if decoding:
            steps.append(seconds)
            closed = parts.now()
        elif not finished:
            opened = parts.now()
    if not steps:
        raise BenchError(f"{len(prompts)} requests never decoded together in {new_tokens} tokens; give more new tokens")
    return {
        "window_tokens": tokens,
        "window_seconds": sum(steps),
        "steps": len(steps),
        "step_seconds": statistics.median(steps),
        **{part: None if value is None else value - (opened[part] or 0.0) for part, value in closed.items()},
        **{name: engine.counts[name] - before[name] for name in COUNTERS},
        "ours": {name: value - ours[name] for name, value in totals().items() if value != ours[name]},
        "token_ids": list(ids.values()),
        "peak_bytes": peak_bytes(),
    }


def repeats(texts: list[list[int]]) -> dict[str, int]:
    """4-grams that occurred before in their text: loops flatter acceptance."""
    grams = [[tuple(ids[i : i + 4]) for i in range(len(ids) - 3)] for ids in texts]
    return {
        "repeated_4_grams": sum(len(own) - len(set(own)) for own in grams), "all_4_grams": sum(map(len, grams)),
    }  # fmt: skip

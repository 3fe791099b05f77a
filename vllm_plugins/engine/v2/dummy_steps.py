# SPDX-License-Identifier: Apache-2.0
"""Timed decode steps of dummy requests, enqueued back to back, as with asynchronous scheduling."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from vllm_ppd.vllm_plugins.engine.dummy_batch import TOKEN, DummyBatch, length_needed

WARM, TIMED = 2, 8  # steps with each number of drafts
STEPS = WARM + TIMED


def time_steps(runner: Any, requests: int, counts: Sequence[int]) -> list[float]:
    """Seconds of a decode step with each number of drafts per request.

    Args:
        runner: vLLM's V2 model runner.
        requests: number of requests.
        counts: numbers of drafts.
    """
    seconds = {}
    runner.kv_connector.set_disabled(True)
    try:
        with DummyBatch(runner, requests, length_needed(counts, STEPS)) as batch:
            # A first step verifies the drafts of the number before it, of which there must be enough.
            for count in sorted(counts, reverse=True):
                batch.drafts, drafts = count, [[TOKEN] * count] * requests
                for _ in range(WARM):
                    batch.decode(drafts)
                wait(runner)
                started = time.perf_counter()
                for _ in range(TIMED):
                    batch.decode(drafts)
                wait(runner)
                seconds[count] = (time.perf_counter() - started) / TIMED
    finally:
        runner.kv_connector.set_disabled(False)
    return [seconds[count] for count in counts]


def wait(runner: Any) -> None:
    """Wait for the device."""
    if runner.device.type != "cpu":
        torch.accelerator.synchronize()

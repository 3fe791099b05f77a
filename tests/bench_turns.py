# SPDX-License-Identifier: Apache-2.0
"""Options and turns of `ppd bench serve`, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from vllm_ppd.benchmarks.serve.generator import COUNTERS, TIMES
from vllm_ppd.benchmarks.serve.options import ServeOptions


def serve_options(**changes: Any) -> ServeOptions:
    return ServeOptions(**{"model": "model", "data": ("texts.jsonl",), "plain": "none", **changes})


def serve_turn(contender: str, number: int, slower: float, **changes: Any) -> dict[str, Any]:
    times = {f"{name}_ms": {"mean": 10 * slower, "p50": 9 * slower, "p95": 20 * slower, "p99": 30.0} for name in TIMES}
    return {
        "contender": contender, "group": 0, "round": number, "rate": 2.0, "concurrency": None, "completed": 8,
        "failed": 0, "requests_per_second": 2.0, "tokens_per_second": 100 / slower, **times,
        **dict.fromkeys(COUNTERS), "prefix_queries": 100, "prefix_hits": 25, **changes,
    }  # fmt: skip

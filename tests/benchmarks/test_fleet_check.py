# SPDX-License-Identifier: Apache-2.0
"""The check of the fleet simulation, against a server that is as ideal as the simulation takes it to be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vllm_ppd.benchmarks.harness.contenders import BASE
from vllm_ppd.heads.planning.fleet import served

SCRIPT = ["-m", "vllm_ppd.benchmarks.serve.fleet_check"]
TTFT = 0.2


def ideal_turn(rate: float | None, concurrency: int | None) -> dict[str, object]:
    """A token takes 10 ms, and 5 ms more for each request beside; a prompt takes 0.2 s of an idle server."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(20, 200, 40)
    speed = 1 / (0.01 + 0.005 * np.arange(40))
    if concurrency is not None:
        arrival, latency = np.arange(40.0), TTFT + (tokens - 1) / speed[concurrency - 1]
    else:
        arrival = np.cumsum(rng.exponential(1 / (rate or 1.0), 40))
        latency = served(speed, arrival, tokens - 1 + TTFT * speed[0], 1)
    return {
        "contender": BASE, "group": 0, "round": 0, "rate": rate, "concurrency": concurrency,
        "arrival": arrival.tolist(), "latency": latency.tolist(), "ttft": [TTFT] * 40, "output_tokens": tokens.tolist(),
    }  # fmt: skip


def test_an_ideal_server_is_predicted(tmp_path: Path) -> None:
    turns = [ideal_turn(None, 1), ideal_turn(None, 4), ideal_turn(0.5, None), ideal_turn(2.0, None)]
    run = {
        "git": "0", "versions": {}, "machine": "ideal", "options": {"model": "m"}, "target_stamp": None,
        "contenders": {BASE: {}}, "turns": turns,
    }  # fmt: skip
    path, out = tmp_path / "serve.json", tmp_path / "check.json"
    path.write_text(json.dumps({"benchmark": "serve", "runs": [run]}))
    said = subprocess.run([sys.executable, *SCRIPT, path, "--out", out], capture_output=True, text=True, check=True)
    assert len(said.stdout.splitlines()) == 2 + 2
    slow, fast = json.loads(out.read_text())["rows"]
    assert (slow["requests a second"], fast["requests a second"], slow["requests"]) == (0.5, 2.0, 40)
    for row in (slow, fast):
        assert (row["p50 / measured"], row["p95 / measured"]) == pytest.approx((1.0, 1.0), abs=0.02)
        assert row["plan p50 s"] < row["with prompts p50 s"]
    assert fast["measured p95 s"] > 1.5 * slow["measured p95 s"]
    run["turns"] = turns[1:]
    path.write_text(json.dumps({"benchmark": "serve", "runs": [run]}))
    refused = subprocess.run([sys.executable, *SCRIPT, path], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "at 1 request at once are needed" in refused.stderr

# SPDX-License-Identifier: Apache-2.0
"""A server as a user starts it: `vllm serve` in a process of its own, on the loopback interface."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

VLLM = [str(Path(sys.executable).with_name("vllm")), "serve"]
START_SECONDS = 300


def environment() -> dict[str, str]:
    changes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    return {**os.environ, **changes}


class Server:
    """`vllm serve MODEL ARGS` on a free port of the loopback interface."""

    def __init__(self, model: Path, log: Path, *args: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log, self.model = log, str(model)
        command = [
            *VLLM, str(model), "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager",
            "--max-model-len", "256", "--kv-cache-memory-bytes", str(1 << 26), *args,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=log.open("w"), stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, log.read_text()[-3000:]
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        self.stop()
        raise AssertionError(f"no server after {START_SECONDS} s: {log.read_text()[-3000:]}")

    def complete(self, **body: Any) -> httpx.Response:
        defaults = {"model": self.model, "prompt": "def main(", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        return self.http.post("/v1/completions", json={**defaults, **body})

    def metrics(self) -> dict[str, float]:
        """Each series of /metrics, summed over its labels."""
        values: dict[str, float] = {}
        for line in self.http.get("/metrics").text.splitlines():
            sample = re.match(r"((?:vllm|ppd):\w+)(?:\{[^}]*\})? (\S+)$", line)
            if sample:
                values[sample[1]] = values.get(sample[1], 0.0) + float(sample[2])
        return values

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(30)

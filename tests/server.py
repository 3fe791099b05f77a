# SPDX-License-Identifier: Apache-2.0
"""A server as a user starts it: `vllm serve` in a process of its own, on the loopback interface."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from vllm_ppd.vllm_plugins.platform import on_end_of_parent

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
START_SECONDS = 300
STOP_SECONDS = 30
FLAGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=256",
    f"--kv-cache-memory-bytes={1 << 26}",
)


class Server:
    """`vllm serve MODEL ARGS` on a free port of the loopback interface."""

    def __init__(self, model: Path, log: Path, *args: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.log = log
        self.model = str(model)
        address = ("--host", "127.0.0.1", "--port", port)
        command = [
            *VLLM,
            "serve",
            self.model,
            *address,
            *FLAGS,
            *args,
        ]
        environment = {
            **os.environ,
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        # vLLM's CPU build installs it, and asks for it
        openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
        if openmp.exists():
            environment.setdefault("LD_PRELOAD", str(openmp))
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=partial(on_end_of_parent, signal.SIGTERM),
            )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, log.read_text()[-3000:]
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        self.stop()
        raise AssertionError(
            f"no server after {START_SECONDS} s: {log.read_text()[-3000:]}"
        )

    def complete(self, **body: Any) -> httpx.Response:
        defaults = {
            "model": self.model,
            "prompt": "def main(",
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
        }
        return self.http.post("/v1/completions", json={**defaults, **body})

    def metrics(self) -> dict[str, float]:
        """Each series of /metrics, summed over its labels."""
        values: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(
            self.http.get("/metrics").text
        ):
            for sample in family.samples:
                values[sample.name] += sample.value
        return values

    def stop(self) -> None:
        """End the server and all processes that it started."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

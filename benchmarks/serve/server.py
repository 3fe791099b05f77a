# SPDX-License-Identifier: Apache-2.0
"""A contender as `vllm serve` in a process of its own, on a free port of the loopback interface."""

import contextlib
import json
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

import requests
from prometheus_client.parser import text_string_to_metric_families

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.contenders import Contender
from vllm_ppd.benchmarks.harness.machine import free_bytes, huge_pages, peak_bytes
from vllm_ppd.benchmarks.harness.process import last_line
from vllm_ppd.vllm_plugins.platform import on_end_of_parent

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
START_SECONDS = 900
STOP_SECONDS = 30
SETTLE_SECONDS = 10.0  # until a server has counted the requests that it has answered


class Server:
    """A server that has loaded and compiled.

    Attributes:
        facts: memory held and left.
    """

    def __init__(self, contender: Contender, model: str, arguments: dict[str, Any], log: Path) -> None:
        """Start it and wait until it answers.

        Args:
            contender: its speculative_config, and arguments of it alone.
            model: target.
            arguments: of every server; names as vLLM's engine arguments.
            log: where its output goes.

        Raises:
            BenchError: if it does not start; with the last line of its output.
        """
        self.name, self.model, self.tokenizer, self.log = contender.name, model, arguments.get("tokenizer", model), log
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        speculation = {"speculative_config": contender.speculative_config} if contender.speculative_config else {}
        words = ["serve", model, "--host", "127.0.0.1", "--port", str(self.port)]
        before = free_bytes()
        self.process = start([*words, *flags(arguments | contender.engine | speculation)], log, contender.environment)
        try:
            self._wait()
            left = free_bytes()
            self.facts = {"peak_bytes": max(peak_bytes(self.process.pid), before - left), "free_bytes": left}
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self.check()
            with contextlib.suppress(OSError):
                self._request("/health")
                return
            time.sleep(0.25)
        raise BenchError(f"{self.name}: no answer after {START_SECONDS} s; its last line: {last_line(self.log)}")

    def check(self) -> None:
        """Raise BenchError if the server has ended."""
        code = self.process.poll()
        if code is not None:
            raise BenchError(f"{self.name}: the server ended with code {code}; its last line: {last_line(self.log)}")

    def complete(self, prompt: str, tokens: int, temperature: float) -> None:
        """Send a request by itself; raises BenchError if it is not answered."""
        self._ask("/v1/completions", {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": temperature, "ignore_eos": True,
        })  # fmt: skip

    def counters(self) -> dict[str, float]:
        """Each series of /metrics, summed over its labels, once no request is running any more; 0 for others.

        Raises:
            BenchError: if the server has ended.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            values: dict[str, float] = defaultdict(float)
            for family in text_string_to_metric_families(self._ask("/metrics")):
                for sample in family.samples:
                    values[sample.name] += sample.value
            busy = values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"]
            if not busy or time.monotonic() > deadline:
                return values
            time.sleep(0.05)

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        try:
            return self._request(path, body)
        except OSError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2)  # a server that is ending may need a moment for it
            self.check()
            raise BenchError(f"{self.name}: {path} did not answer ({error})") from None

    def _request(self, path: str, body: dict[str, Any] | None = None) -> str:
        method = "GET" if body is None else "POST"
        answer = self._session.request(method, f"http://127.0.0.1:{self.port}{path}", json=body, timeout=600)
        answer.raise_for_status()
        return answer.text

    def close(self) -> None:
        end(self.process, signal.SIGINT)


def flags(arguments: dict[str, Any]) -> list[str]:
    """Engine arguments as flags of the command line."""
    words = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


def start(words: list[str], log: Path, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """A command of vLLM in a session of its own, which Ctrl-C does not reach and which ends with this process.

    Args:
        words: of the command line, after `vllm`.
        log: where its output goes.
        environment: variables beside those of this process and, without a GPU, what vLLM's CPU backend wants to know.
    """
    variables = {**os.environ, **huge_pages(), "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    variables.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over a size that is given
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"  # vLLM's CPU build installs it, and asks for it
    if openmp.exists():
        variables.setdefault("LD_PRELOAD", str(openmp))
    with log.open("w") as output:
        return subprocess.Popen(
            [*VLLM, *words], stdout=output, stderr=subprocess.STDOUT, env=variables | (environment or {}),
            start_new_session=True, preexec_fn=partial(on_end_of_parent, signal.SIGTERM),
        )  # fmt: skip


def end(process: subprocess.Popen[Any], how: signal.Signals) -> None:
    """End a process that leads a session, and all that it started, kindly at first."""
    if process.poll() is None:
        os.killpg(process.pid, how)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what outlived the leader
    process.wait()

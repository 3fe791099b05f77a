# SPDX-License-Identifier: Apache-2.0
"""A contender as an engine in a separate process, which decodes when it is its turn.

The engine core runs inside that process, so that its steps can be timed one by one; between turns it waits on a pipe.
"""

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.contenders import Contender
from vllm_ppd.benchmarks.harness.machine import IN_PROCESS, huge_pages


class EngineProcess:
    """The parent's side of a contender."""

    def __init__(self, contender: Contender, arguments: dict[str, Any], log: Path) -> None:
        """Start it; ready() waits until it has loaded and compiled.

        Args:
            contender: its speculative_config.
            arguments: of vLLM's LLM.
            log: where its output goes.
        """
        self.name, self.log = contender.name, log
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        engine = arguments | contender.engine
        self.ranks = engine.get("pipeline_parallel_size", 1) * engine.get("tensor_parallel_size", 1)
        environment = IN_PROCESS | huge_pages() | contender.environment
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            args = (theirs, contender, arguments, str(log))
            self.process = context.Process(target=_serve, args=args, name=contender.name)
            self.process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        theirs.close()
        self.facts: dict[str, Any] = {}

    def ready(self) -> None:
        """Wait until it can take turns; then its facts are known.

        Raises:
            BenchError: if it does not start, with the last line of its output.
        """
        self.facts = self._receive()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the Engine and return its result; raises BenchError if the engine fails."""
        with contextlib.suppress(BrokenPipeError):  # the received message says why
            self.pipe.send((method, arguments))
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code, last = self.process.exitcode, last_line(self.log)
            raise BenchError(f"{self.name}: the engine ended with code {code}; its last line: {last}") from None
        if isinstance(answer, str):
            raise BenchError(f"{self.name}: {answer}")
        return answer

    def close(self) -> None:
        """End the process in any state."""
        self.pipe.close()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class SharedEngine:
    """A contender that takes its turns on another contender's engine, with adaptive drafting or without."""

    def __init__(self, contender: Contender, engine: EngineProcess) -> None:
        self.name, self.adaptive, self.engine = contender.name, contender.adaptive, engine
        self.ranks, self.facts = engine.ranks, engine.facts

    def ready(self) -> None:
        """Take the engine's facts; it was waited for before."""
        self.facts = self.engine.facts

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the Engine and return its result; raises BenchError if the engine fails."""
        if self.adaptive is None:
            return self.engine.call(method, *arguments)
        self.engine.call("adapt", self.adaptive)
        try:
            return self.engine.call(method, *arguments)
        finally:
            self.engine.call("adapt", not self.adaptive)

    def close(self) -> None:
        """Leave the engine to its contender."""


def _serve(pipe: Connection, contender: Contender, arguments: dict[str, Any], log: str) -> None:
    """The child's side: load, then call the engine for each message, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        from vllm.platforms import current_platform

        from vllm_ppd.benchmarks.harness.engine import Engine
        from vllm_ppd.vllm_plugins.engine.cpu.workarounds import mend_workers_to_come

        if current_platform.is_cpu():
            # vLLM's methods sample wrongly on this backend; compare them without that mistake.
            mend_workers_to_come()
        engine = Engine(contender, arguments)
        pipe.send(engine.facts)
        while True:
            method, args = pipe.recv()
            pipe.send(getattr(engine, method)(*args))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        import traceback

        traceback.print_exc()
        pipe.send(" ".join(str(error).split())[:400] or type(error).__name__)


def last_line(log: Path) -> str:
    """The last line that a process wrote."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")

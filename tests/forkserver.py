# SPDX-License-Identifier: Apache-2.0
"""Processes forked from one that has imported vLLM, which takes a process over ten
seconds of CPU time. Servers start theirs as users' do.
"""

import gc
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context
from pathlib import Path

import pytest

# vLLM alone: each process loads our plugin itself.
multiprocessing.set_forkserver_preload(
    [
        "compressed_tensors",
        "vllm.compilation.backends",
        "vllm.entrypoints.llm",
        "vllm.entrypoints.openai.responses.serving",
        "vllm.model_executor.models.llama",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.cpu.model_runner",
        "vllm.v1.worker.gpu.model_runner",
    ]
)


class ForkedProcess(context.ForkServerProcess):
    """Has its parent's environment of the moment it starts, as a spawned process."""

    def start(self) -> None:
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        # vLLM collects garbage at its start, and need not look through its imports
        gc.freeze()
        os.environ.clear()
        os.environ.update(self.environment)
        super().run()


class Forkserver(context.ForkServerContext):
    """A context of multiprocessing."""

    Process = ForkedProcess


def write_output_to(log: Path) -> None:
    """Have this process append its output to a file."""
    with log.open("a") as file:
        for output in (1, 2):
            os.dup2(file.fileno(), output)


@contextmanager
def forking_workers() -> Iterator[None]:
    """Within it, vLLM's executor forks its workers."""
    from vllm.v1.executor import multiproc_executor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiproc_executor, "get_mp_context", Forkserver)
        yield

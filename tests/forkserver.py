# SPDX-License-Identifier: Apache-2.0
"""Processes forked from one that has imported vLLM, which takes a process over ten
seconds of CPU time. Servers start theirs as users' do.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import context
from typing import Any

import pytest

# vLLM alone: each process loads our plugin itself.
PRELOADED = [
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.model_executor.models.llama",
]


def run(
    environment: dict[str, str],
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Call target with the present environment of the parent, as a spawned process would."""
    os.environ.clear()
    os.environ.update(environment)
    target(*args, **kwargs)


class Forkserver(context.ForkServerContext):
    """A context of multiprocessing."""

    def Process(  # type: ignore[override]
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Any:
        self.set_forkserver_preload(PRELOADED)
        given = (dict(os.environ), target, args, kwargs or {})
        return super().Process(target=run, args=given, **settings)


@contextmanager
def forking_workers() -> Iterator[None]:
    """Within it, vLLM's executor forks its workers."""
    from vllm.v1.executor import multiproc_executor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiproc_executor, "get_mp_context", Forkserver)
        yield

# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs without CUDA: what drafting computes is recorded once a batch size, and
computed again from there.

As in a graph, a replay runs no Python of ours or of vLLM: the same operations and
kernels read and write the same memory, and whatever the host decided at the recording
stays decided.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.attention import Attention
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

SIZES = (1, 2, 4)  # requests
# The CPU's attention divides its work by the lengths, in a tensor whose size follows
# them; a GPU's does so in place.
PLANNER = "get_scheduler_metadata"


@contextmanager
def launches_apart(
    record: Callable[[Callable[[], Any]], None] | None = None,
) -> Iterator[None]:
    """Within, a kernel is one step: what it does inside is no operation of the host, as
    on a GPU.

    Args:
        record: is given each launch, to be called again.
    """
    owner: Any = KernelOverride
    name = "_launch"
    if HAS_TRITON:
        from triton.runtime.interpreter import InterpretedFunction

        owner = InterpretedFunction
        name = "run"
    stock = getattr(owner, name)

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        def again() -> Any:
            with _disable_current_modes(), DisableTorchFunction():
                return stock(kernel, *args, **kwargs)

        if record is not None:
            record(again)
        return again()

    setattr(owner, name, launch)
    try:
        yield
    finally:
        setattr(owner, name, stock)


class Recording(TorchDispatchMode):
    """Every operation and every kernel of vLLM's that runs within it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        self.plans: dict[
            int, torch.Tensor
        ] = {}  # by what stood in its place at the recording
        self.kept: list[
            torch.Tensor
        ] = []  # which no other tensor may be taken for

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        outputs = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ == PLANNER:
            self.calls.append(
                lambda: self.plans.update(
                    {id(outputs): function(*args, **(kwargs or {}))}
                )
            )
            self.kept.append(outputs)
            return outputs

        def again() -> None:
            current = [self.plans.get(id(arg), arg) for arg in args]
            _write(outputs, function(*current, **(kwargs or {})))

        self.calls.append(again)
        return outputs

    def replay(self) -> None:
        for call in self.calls:
            call()


def _write(outputs: Any, results: Any) -> None:
    """Bring a result to where the recorded one lies; one in place, or a view, is there already."""
    if isinstance(outputs, torch.Tensor):
        if outputs.data_ptr() != results.data_ptr():
            outputs.copy_(results)
    elif isinstance(outputs, tuple | list):
        for output, result in zip(outputs, results, strict=True):
            _write(output, result)


class Replayed:
    """In place of a speculator's graphs of greedy drafting."""

    def __init__(self, speculator: Any) -> None:
        self.speculator = speculator
        self.replays = 0
        self.graphs: dict[BatchExecutionDescriptor, Recording] = {}

    def dispatch(self, num_reqs: int, *_: Any) -> BatchExecutionDescriptor:
        size = next(size for size in SIZES if size >= num_reqs)
        return BatchExecutionDescriptor(
            CUDAGraphMode.FULL,
            num_tokens=size,
            num_reqs=size,
        )

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> None:
        self.graphs[desc].replay()
        self.replays += 1

    def capture(self) -> None:
        """Record a draft of every size, as before a server takes requests: its rows are
        nobody's.
        """
        for size in SIZES:
            desc = self.dispatch(size)
            work = self.speculator.prepare_capture(
                False,
                desc,
                warmup=False,
            )
            recording = Recording()
            launches = launches_apart(recording.calls.append)
            with torch.inference_mode(), launches, recording:
                work(CUDAGraphMode.FULL)
            self.graphs[desc] = recording


def call_attention_directly(model: torch.nn.Module) -> None:
    """Not as one operation, whose Python would look for the step's metadata at a replay."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.use_direct_call = True

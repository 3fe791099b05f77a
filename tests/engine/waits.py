# SPDX-License-Identifier: Apache-2.0
"""What makes the host wait for the device."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from replayed import launches_apart
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Values read as Python numbers, and results whose shape depends on values.
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "unique_dim",
    "_unique2",
    "bincount",
}

# Copies to the host, which are no operations of a tensor on a CPU.
READS = {"cpu", "tolist"}


class Reads(TorchFunctionMode):
    """Adds the copies to the host within to what waits."""

    def __init__(self, waits: set[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.waits |= READS & {func.__name__}
        return func(*args, **(kwargs or {}))


class Waits(TorchDispatchMode):
    """Counts the operations within, and names those that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.waits: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        self.operations[name] += 1
        if name in WAITS:
            self.waits.add(name)
        indices = args[1] if name in ("index", "index_put_") else ()
        if any(
            index is not None and index.dtype == torch.bool for index in indices
        ):
            self.waits.add("indexed by a mask")
        return func(*args, **(kwargs or {}))


@contextmanager
def watching(owner: Any, *calls: str) -> Iterator[list[Waits]]:
    """The operations of each call of an object's methods within; a kernel is one."""
    modes = []

    def watched(call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with (
                Waits() as mode,
                launches_apart(lambda _: mode.operations.update(["kernel"])),
                Reads(mode.waits),
            ):
                modes.append(mode)
                return call(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(owner, name, watched(getattr(owner, name)))
        yield modes
    assert modes and all(mode.operations for mode in modes)

# SPDX-License-Identifier: Apache-2.0
"""What makes the host wait for the device."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from replayed import launches_apart
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


class Waits(TorchDispatchMode):
    """Counts the operations of a block, and those that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        boolean = name.startswith("index") and any(
            isinstance(part, torch.Tensor) and part.dtype == torch.bool
            for part in (
                args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
            )
        )
        self.seen["indexed by a mask" if boolean else name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def waits(self) -> list[str]:
        return sorted(
            name for name in self.seen if name in WAITS or name == "indexed by a mask"
        )


@contextmanager
def watching(speculator: Any) -> Iterator[list[Waits]]:
    """The operations of each call of a speculator's propose within."""
    stock = speculator.propose
    modes = []

    def propose(*args: Any, **kwargs: Any) -> Any:
        with launches_apart(), Waits() as mode:
            modes.append(mode)
            return stock(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculator, "propose", propose)
        yield modes
    assert modes and all(mode.seen for mode in modes)

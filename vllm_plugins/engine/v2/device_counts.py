# SPDX-License-Identifier: Apache-2.0
"""Counts that are made on the device, in CUDA graphs, too, and read by the host without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from vllm.utils.platform_utils import is_uva_available
from vllm.v1.worker.gpu.buffer_utils import UvaBuffer


class DeviceCounts:
    """A number for each name, in memory of the host that the device adds to.

    The host sees what the device has written so far, a step or two behind. On a device without unified addressing it
    sees nothing.

    Args:
        names: of our counters.
        device: that counts.
    """

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.names = names
        self._values, self._seen = torch.zeros(len(names), dtype=torch.int64, device=device), np.zeros(0)
        if self._values.device.type == "cpu":
            self._seen = self._values.numpy()
        elif is_uva_available():
            buffer = UvaBuffer(len(names), torch.int64)
            self._values, self._seen = buffer.uva(), buffer.np
        self._taken = np.zeros_like(self._seen)

    def add(self, name: str, requests: torch.Tensor) -> None:
        """Count the requests for which a condition holds: [requests] bool."""
        self._values[self.names.index(name)] += requests.sum()

    def take(self) -> dict[str, int]:
        """What the device has counted since the last call."""
        seen = self._seen.copy()
        new, self._taken = seen - self._taken, seen
        return dict(zip(self.names, new.tolist(), strict=False))

# SPDX-License-Identifier: Apache-2.0
"""Counters on the device that the host reads without waiting."""

import numpy as np
import torch
from vllm.utils.platform_utils import is_uva_available
from vllm.v1.worker.gpu.buffer_utils import UvaBuffer


class DeviceCounts:
    """Numbers in the host's memory which the device writes.

    The host sees what the device has written so far, a step or two behind. On a device
    without unified addressing it sees zeros.

    Attributes:
        value: [size] int64, on the device.
        seen: [size], in the host's memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.value = torch.zeros(size, dtype=torch.int64, device=device)
        self.seen = np.zeros(size, dtype=np.int64)
        if self.value.device.type == "cpu":
            self.seen = self.value.numpy()
        elif is_uva_available():
            buffer = UvaBuffer(size, torch.int64)
            self.value = buffer.uva()
            self.seen = buffer.np


class DeviceCount(DeviceCounts):
    """A number to which the device adds."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(1, device)
        self._taken = 0

    def take(self) -> int:
        """The device's count since the last call."""
        before = self._taken
        self._taken = int(self.seen[0])
        return self._taken - before

# SPDX-License-Identifier: Apache-2.0
"""A counter on the device that the host reads without waiting."""

import numpy as np
import torch
from vllm.utils.platform_utils import is_uva_available
from vllm.v1.worker.gpu.buffer_utils import UvaBuffer


class DeviceCount:
    """A number in the host's memory to which the device adds.

    The host reads what the device has written so far, a step or two behind. On a device
    without unified addressing it reads 0.
    """

    def __init__(self, device: torch.device) -> None:
        self.value = torch.zeros(1, dtype=torch.int64, device=device)
        self._seen = np.zeros(1)
        self._taken = 0
        if self.value.is_cpu:
            self._seen = self.value.numpy()
        elif is_uva_available():
            buffer = UvaBuffer(1, torch.int64)
            self.value = buffer.uva()
            self._seen = buffer.np

    def take(self) -> int:
        """The device's count since the last call."""
        before = self._taken
        self._taken = int(self._seen[0])
        return self._taken - before

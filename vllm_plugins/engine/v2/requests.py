# SPDX-License-Identifier: Apache-2.0
"""What requests ask of drafting, by their permanent rows: written by the host when one is added, read on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

from vllm_ppd.vllm_plugins.config.request_options import back_off_threshold, drafting_allowed


class RequestOptions:
    """Of every request row.

    Args:
        rows: request rows of the runner.
    """

    def __init__(self, rows: int) -> None:
        self.max_drafts = UvaBackedTensor(rows, dtype=torch.int64)  # 0 where the request opted out
        self.greedy = UvaBackedTensor(rows, dtype=torch.bool)  # its drafts are the best tokens at any temperature
        self.eps_b = UvaBackedTensor(rows, dtype=torch.float32)  # NaN where it has no threshold of its own

    def add(self, row: int, params: Any, num_drafts: int) -> None:
        """Take a request in.

        A seed promises the same output on every run, and drafts are drawn from a generator that requests share. A
        grammar cuts drafts off by what was drawn, after which q(x) is not what they were drawn from.

        Args:
            row: of the request.
            params: vLLM's SamplingParams; None for a pooling request.
            num_drafts: K.
        """
        extra = getattr(params, "extra_args", None)
        threshold = back_off_threshold(extra)
        self.max_drafts.np[row] = num_drafts if drafting_allowed(extra) else 0
        self.greedy.np[row] = params is not None and (params.seed is not None or params.structured_outputs is not None)
        self.eps_b.np[row] = np.nan if threshold is None else threshold

    def apply(self) -> None:
        """Bring what was added to the device."""
        for values in (self.max_drafts, self.greedy, self.eps_b):
            values.copy_to_uva()

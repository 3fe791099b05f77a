# SPDX-License-Identifier: Apache-2.0
"""The requests' options for drafting, by their permanent rows."""

from enum import IntEnum
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.kernels.sampling import GREEDY_BELOW
from vllm_ppd.vllm_plugins.config.request_options import back_off_threshold, drafting_allowed, needs_single_tokens


class Setting(IntEnum):
    """Columns of a request's settings that drafting reads on the device."""

    MAX_DRAFTS = 0
    TEMPERATURE = 1  # 0 for greedy requests
    TOP_K = 2
    TOP_P = 3
    EPS_B = 4


class RequestOptions:
    """Options of every request row, as arrays on the host and as a table on the device.

    Args:
        rows: request rows of the runner. The device has one more, row -1, which the padding of CUDA graphs reads.
        num_drafts: K.
        vocab_size: of the target.
        device: on which drafts are made.
        verified: whether drafts are verified; if not, requests that need one token at a time have none.
    """

    def __init__(
        self,
        rows: int,
        num_drafts: int,
        vocab_size: int,
        device: torch.device,
        verified: bool = True,
    ) -> None:
        self.num_drafts, self.vocab_size = num_drafts, vocab_size
        self.verified = verified
        self.drafting = np.zeros(rows, dtype=bool)  # False if the request has no drafts
        self.is_greedy = np.zeros(rows, dtype=bool)
        # Exact in float32: drafts, temperatures, a top-k below 2^24, and NaN for no threshold.
        self.settings = np.zeros((rows, len(Setting)), dtype=np.float32)
        self.on_device = torch.zeros(rows + 1, len(Setting), device=device)

    def add(self, row: int, params: Any) -> None:
        """Add a request.

        Args:
            row: of the request.
            params: vLLM's SamplingParams; None for a pooling request.
        """
        extra = getattr(params, "extra_args", None)
        threshold = back_off_threshold(extra)
        self.drafting[row] = drafting_allowed(extra) and (self.verified or not needs_single_tokens(params))
        self.is_greedy[row] = params is None or params.temperature < GREEDY_BELOW
        temperature = 0.0 if self.is_greedy[row] else params.temperature
        top_k = self.vocab_size if params is None or not 0 < params.top_k < self.vocab_size else params.top_k
        self.settings[row] = (
            self.num_drafts if self.drafting[row] else 0,
            temperature,
            top_k,
            1.0 if params is None else params.top_p,
            np.nan if threshold is None else threshold,
        )

    def apply(self) -> None:
        """Copy added options to the device in stream order, so that steps in flight read those they began with."""
        async_tensor_h2d(self.settings, out=self.on_device[:-1])

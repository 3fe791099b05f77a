# SPDX-License-Identifier: Apache-2.0
"""The drafter's inputs for a step, in fixed buffers that CUDA graphs read, and the
requests' options by row.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.sampling import GREEDY_BELOW, Sampling
from vllm_ppd.kernels.staging import Staged, StepEnd, stage
from vllm_ppd.vllm_plugins.config.request_options import (
    needs_single_tokens,
    request_options,
)
from vllm_ppd.vllm_plugins.engine.drafter import Drafter, DraftInputs, LookedUp
from vllm_ppd.vllm_plugins.engine.target import Target


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
        rows: request rows of the runner. The device has one more, row -1, which the
            padding of CUDA graphs reads.
        num_drafts: K.
        vocab_size: of the target.
        device: on which drafts are made.
        verified: whether drafts are verified; if not, requests that need one token at a
            time have none.
    """

    def __init__(
        self,
        rows: int,
        num_drafts: int,
        vocab_size: int,
        device: torch.device,
        verified: bool = True,
    ) -> None:
        self.num_drafts = num_drafts
        self.vocab_size = vocab_size
        self.verified = verified
        self.drafting = np.zeros(rows, dtype=bool)  # False if the request has no drafts
        self.is_greedy = np.zeros(rows, dtype=bool)
        # Exact in float32: drafts, temperatures, a top-k below 2^24, and NaN for no
        # threshold.
        self.settings = np.zeros((rows, len(Setting)), dtype=np.float32)
        self.on_device = torch.zeros(rows + 1, len(Setting), device=device)

    def add(self, row: int, params: Any) -> None:
        """Add a request.

        Args:
            row: of the request.
            params: vLLM's SamplingParams; None for a pooling request.
        """
        options = request_options(getattr(params, "extra_args", None))
        threshold = options.ppd_eps_b
        self.drafting[row] = options.ppd_draft and (
            self.verified or not needs_single_tokens(params)
        )
        self.is_greedy[row] = params is None or params.temperature < GREEDY_BELOW
        temperature = 0.0 if self.is_greedy[row] else params.temperature
        top_k = (
            self.vocab_size
            if params is None or not 0 < params.top_k < self.vocab_size
            else params.top_k
        )
        self.settings[row] = (
            self.num_drafts if self.drafting[row] else 0,
            temperature,
            top_k,
            1.0 if params is None else params.top_p,
            np.nan if threshold is None else threshold,
        )

    def apply(self) -> None:
        """Copy added options to the device in stream order, so that steps in flight
        read those they began with.
        """
        async_tensor_h2d(self.settings, out=self.on_device[:-1])


def batch_sizes(most: int) -> Iterator[int]:
    """Batch sizes to warm up, largest first, which takes the most memory; kernels
    differ by powers of two.
    """
    yield most
    size = 1 << (most - 1).bit_length() >> 1
    while size:
        yield size
        size >>= 1


class Staging:
    """Buffers for the inputs of up to a number of requests.

    Args:
        requests: the largest batch.
        target, drafter: loaded.
        options: of the request rows.
        reads_eps_b: whether the drafter reads the requests' back-off thresholds.
    """

    def __init__(
        self,
        requests: int,
        target: Target,
        drafter: Drafter,
        options: RequestOptions,
        reads_eps_b: bool,
    ) -> None:
        self.options = options
        self.reads_eps_b = reads_eps_b
        device = target.device
        self.rows = torch.zeros(requests, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.rows)
        self.staged = Staged(
            rows=self.rows,
            newest_ids=torch.zeros_like(self.rows),
            places=torch.zeros_like(self.rows),
            positions=self.positions,
            hidden=torch.zeros(
                requests, target.hidden_size, dtype=target.dtype, device=device
            ),
            settings=torch.zeros(options.on_device.shape[1], requests, device=device),
            seeds=torch.zeros_like(self.rows),
        )
        self.context: torch.Tensor | None = None
        if drafter.context_tokens:
            shape = (requests, drafter.context_tokens)
            self.context = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.stage_nobody()

    def stage_nobody(self) -> None:
        """Stage padding that counts as sampling requests, for dummy runs and captures."""
        self.rows.fill_(-1)
        settings = self.staged.settings
        settings[Setting.MAX_DRAFTS] = self.options.num_drafts
        settings[Setting.TEMPERATURE] = 1.0
        settings[Setting.TOP_P] = 1.0
        settings[Setting.TOP_K] = self.options.vocab_size
        settings[Setting.EPS_B] = torch.nan

    def stage(self, end: StepEnd, padded: int) -> None:
        """Stage a verified step, and mark the padding after its requests, in one launch
        on a GPU.
        """
        chosen(stage, end.hidden)(end, self.options.on_device, self.staged, padded)

    def setting(self, column: Setting, requests: int) -> torch.Tensor:
        """A setting of the first staged requests: [requests] float32."""
        return self.staged.settings[column, :requests]

    def inputs(
        self,
        requests: int,
        sampled: bool,
        num_drafts: int,
        looked_up: LookedUp | None = None,
    ) -> DraftInputs:
        """The drafter's inputs for the first staged requests.

        Args:
            requests: how many.
            sampled: whether drafts are drawn; else each is the best token.
            num_drafts, looked_up: as in DraftInputs.
        """
        sampling = None
        if sampled:
            sampling = Sampling(
                self.setting(Setting.TEMPERATURE, requests),
                self.setting(Setting.TOP_K, requests),
                self.setting(Setting.TOP_P, requests),
                seeds=self.staged.seeds[:requests],
                positions=self.positions[:requests],
            )
        return DraftInputs(
            newest_ids=self.staged.newest_ids[:requests],
            hidden=self.staged.hidden[:requests],
            places=self.staged.places[:requests],
            num_drafts=num_drafts,
            sampling=sampling,
            options={"eps_b": self.setting(Setting.EPS_B, requests)}
            if self.reads_eps_b
            else {},
            context=None if self.context is None else self.context[:requests],
            looked_up=looked_up,
        )

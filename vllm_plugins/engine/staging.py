# SPDX-License-Identifier: Apache-2.0
"""The drafter's inputs for a step, in fixed buffers that CUDA graphs read, and the
requests' options by row; and numbers that the device returns without a wait.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from vllm.utils.platform_utils import is_uva_available
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import UvaBuffer

from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.sampling import GREEDY_BELOW, UNLIMITED, Sampling
from vllm_ppd.kernels.staging import Staged, StepEnd, stage
from vllm_ppd.vllm_plugins.config.request_options import (
    needs_single_tokens,
    request_options,
)
from vllm_ppd.vllm_plugins.engine.drafter import DraftInputs, LookedUp
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
        device: on which drafts are made.
        verified: whether drafts are verified; if not, requests that need one token at a
            time have none.
        eps_b: back-off threshold of requests that set none.
    """

    def __init__(
        self,
        rows: int,
        num_drafts: int,
        device: torch.device,
        verified: bool,
        eps_b: float,
    ) -> None:
        self.num_drafts = num_drafts
        self.verified = verified
        self.eps_b = eps_b
        # Exact in float32: drafts, temperatures, and a top-k below 2^24 or UNLIMITED
        self.settings = np.zeros((rows, len(Setting)), dtype=np.float32)
        self.on_device = torch.zeros(rows + 1, len(Setting), device=device)
        self._added = False  # whether the device lacks the latest requests

    def add(self, row: int, params: Any) -> None:
        """Add a request.

        Args:
            row: of the request.
            params: vLLM's SamplingParams.
        """
        options = request_options(params.extra_args)
        threshold = options.ppd_eps_b
        drafting = self.verified or not needs_single_tokens(params)
        greedy = params.temperature < GREEDY_BELOW
        self.settings[row] = (
            options.most_drafts(self.num_drafts) if drafting else 0,
            0.0 if greedy else params.temperature,
            params.top_k if params.top_k > 0 else UNLIMITED,
            params.top_p,
            self.eps_b if threshold is None else threshold,
        )
        self._added = True

    def apply(self) -> None:
        """Copy added options to the device, before a step drafts or verifies drafts.

        The copy is in stream order, so that steps in flight read those they began with.
        """
        if self._added:
            async_tensor_h2d(self.settings, out=self.on_device[:-1])
            self._added = False


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
        target: loaded.
        options: of the request rows.
    """

    def __init__(
        self, requests: int, target: Target, options: RequestOptions
    ) -> None:
        self.options = options
        device = target.device
        hidden = torch.zeros(
            requests, target.hidden_size, dtype=target.dtype, device=device
        )
        settings = torch.zeros(len(Setting), requests, device=device)
        rows, newest_ids, places, positions, seeds = torch.zeros(
            5, requests, dtype=torch.int64, device=device
        )
        self.staged = Staged(
            rows, newest_ids, places, positions, hidden, settings, seeds
        )
        self.stage_nobody()

    def stage_nobody(self) -> None:
        """Stage padding that counts as sampling requests, for dummy runs and captures."""
        self.staged.rows.fill_(-1)
        self.staged.positions.zero_()
        settings = self.staged.settings
        settings[Setting.TEMPERATURE] = 1.0
        settings[Setting.TOP_P] = 1.0
        settings[Setting.TOP_K] = UNLIMITED
        settings[Setting.EPS_B] = self.options.eps_b

    def stage(self, end: StepEnd, padded: int) -> None:
        """Stage a verified step, and mark the padding after its requests, in one launch
        on a GPU.
        """
        chosen(stage, end.hidden)(
            end, self.options.on_device, self.staged, padded
        )

    def inputs(
        self, places: slice, sampled: bool, looked_up: LookedUp | None
    ) -> DraftInputs:
        """The drafter's inputs for some of the staged requests.

        Args:
            places: of the requests.
            sampled: whether drafts are drawn; else each is the best token.
            looked_up: as in DraftInputs.
        """
        staged = self.staged
        settings = staged.settings[:, places]
        sampling = None
        if sampled:
            sampling = Sampling(
                settings[Setting.TEMPERATURE],
                settings[Setting.TOP_K],
                settings[Setting.TOP_P],
                seeds=staged.seeds[places],
                positions=staged.positions[places],
            )
        return DraftInputs(
            newest_ids=staged.newest_ids[places],
            hidden=staged.hidden[places],
            places=staged.places[places],
            num_drafts=self.options.num_drafts,
            eps_b=settings[Setting.EPS_B],
            sampling=sampling,
            looked_up=looked_up,
        )


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
        self._taken = 0
        if device.type == "cpu":
            self.seen = self.value.numpy()
        elif is_uva_available():
            buffer = UvaBuffer(size, torch.int64)
            self.value = buffer.uva()
            self.seen = buffer.np

    def take(self) -> int:
        """What the device has added since the last call."""
        before = self._taken
        self._taken = int(self.seen.sum())
        return self._taken - before

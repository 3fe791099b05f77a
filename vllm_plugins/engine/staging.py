# SPDX-License-Identifier: Apache-2.0
"""The drafter's inputs for a step, in fixed buffers that CUDA graphs read."""

from collections.abc import Iterator

import torch

from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.kernels.staging import Staged, StepEnd, stage
from vllm_ppd.vllm_plugins.engine.drafter import Drafter, DraftInputs, LookedUp
from vllm_ppd.vllm_plugins.engine.requests import RequestOptions, Setting
from vllm_ppd.vllm_plugins.engine.target import Target


def batch_sizes(most: int) -> Iterator[int]:
    """Batch sizes to warm up, largest first, which takes the most memory; kernels differ by powers of two."""
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
        self, requests: int, target: Target, drafter: Drafter, options: RequestOptions, reads_eps_b: bool
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
            hidden=torch.zeros(requests, target.hidden_size, dtype=target.dtype, device=device),
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
        """Stage a verified step, and mark the padding after its requests, in one launch on a GPU."""
        chosen(stage, end.hidden)(end, self.options.on_device, self.staged, padded)

    def setting(self, column: Setting, requests: int) -> torch.Tensor:
        """A setting of the first staged requests: [requests] float32."""
        return self.staged.settings[column, :requests]

    def inputs(self, requests: int, sampled: bool, num_drafts: int, looked_up: LookedUp | None = None) -> DraftInputs:
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
            options={"eps_b": self.setting(Setting.EPS_B, requests)} if self.reads_eps_b else {},
            context=None if self.context is None else self.context[:requests],
            looked_up=looked_up,
        )

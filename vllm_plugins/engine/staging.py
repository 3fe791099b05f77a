# SPDX-License-Identifier: Apache-2.0
"""The drafter's inputs for a step, in fixed buffers that CUDA graphs read."""

from collections.abc import Callable

import torch

from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.kernels.staging import Staged, StepEnd, stage
from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.engine.drafter import Drafter, DraftInputs, LookedUp
from vllm_ppd.vllm_plugins.engine.requests import RequestOptions, Setting
from vllm_ppd.vllm_plugins.engine.target import Target


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
        self.options, self.reads_eps_b = options, reads_eps_b
        device = target.device
        rows, newest_ids, places, positions = (
            torch.zeros(requests, dtype=torch.int64, device=device) for _ in range(4)
        )
        hidden = torch.zeros(requests, target.hidden_size, dtype=target.dtype, device=device)
        settings = torch.zeros(options.on_device.shape[1], requests, device=device)
        self.staged = Staged(rows, newest_ids, places, positions, hidden, settings, torch.zeros_like(rows))
        self.rows, self.positions = rows, positions
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
        settings[Setting.TEMPERATURE] = settings[Setting.TOP_P] = 1.0
        settings[Setting.TOP_K] = self.options.vocab_size
        settings[Setting.EPS_B] = torch.nan

    def stage(self, end: StepEnd, padded: int) -> None:
        """Stage a verified step, and mark the padding after its requests, in one launch on a GPU."""
        chosen(stage, end.hidden)(end, self.options.on_device, self.staged, padded)

    def setting(self, column: Setting, requests: int) -> torch.Tensor:
        """A setting of the first staged requests: [requests] float32."""
        return self.staged.settings[column, :requests]

    def inputs(
        self,
        requests: int,
        sampled: bool,
        num_drafts: int,
        shallow: Callable[[int, torch.Tensor], CutState] | None,
        looked_up: LookedUp | None = None,
    ) -> DraftInputs:
        """The drafter's inputs for the first staged requests; arguments as in DraftInputs and the host."""
        sampling = None
        if sampled:
            columns = Setting.TEMPERATURE, Setting.TOP_K, Setting.TOP_P
            temperature, top_k, top_p = (self.setting(column, requests) for column in columns)
            seeds, positions = self.staged.seeds[:requests], self.staged.positions[:requests]
            sampling = Sampling(temperature, top_k, top_p, seeds=seeds, positions=positions)
        return DraftInputs(
            newest_ids=self.staged.newest_ids[:requests],
            hidden=self.staged.hidden[:requests],
            places=self.staged.places[:requests],
            num_drafts=num_drafts,
            sampling=sampling,
            shallow=shallow,
            options={"eps_b": self.setting(Setting.EPS_B, requests)} if self.reads_eps_b else {},
            context=None if self.context is None else self.context[:requests],
            looked_up=looked_up,
        )

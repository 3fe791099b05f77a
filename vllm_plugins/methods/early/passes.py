# SPDX-License-Identifier: Apache-2.0
"""Passes of the target's layers before an exit, outside of vLLM's own step on runner V2,
into the target's paged KV cache.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
)

from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.engine.temporary import unseen_by_connectors
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import DeferredKVCut
from vllm_ppd.vllm_plugins.platform import is_cpu

logger = init_logger("vllm.vllm_ppd")


class ShallowPasses:
    """Passes over one token per request between steps.

    Args:
        speculator: our speculator, which stages the requests and has vLLM's KV cache
            and attention groups of the layers before the last exit.
        cut: of the target.
    """

    def __init__(self, speculator: Any, cut: DeferredKVCut) -> None:
        self.speculator = speculator
        self.cut = cut
        self.vllm_config: Any = speculator.vllm_config
        device = speculator.device
        self.starts_cpu = torch.from_numpy(speculator.arange_np)
        self.starts = self.starts_cpu.to(device)
        # Fixed inputs of a pass over one token per request, vLLM's for drafts
        self.buffers = speculator.input_buffers
        passes = speculator.num_speculative_steps + 1
        self.offsets = torch.arange(passes, device=device)[:, None]
        self.zero = torch.tensor(0, device=device)
        self.no_row = self.zero - 1
        # [requests] bounds of sequence lengths; None while capturing a graph
        self.bounds: Tensor | None = None
        self.without_attention = False
        # Whether metadata are updated in place, so that a CUDA graph may contain the
        # passes; unknown before vLLM has measured its memory
        self.capturable = False
        # Attention metadata of the current drafting passes
        self.metadata: dict[str, Any] | None = None

    @property
    def max_model_len(self) -> int:
        """The length past which no KV is written; vLLM reduces it to what fits."""
        return self.vllm_config.model_config.max_model_len

    def begin_drafting(
        self, bounds: Tensor | None, without_attention: bool = False
    ) -> None:
        """A step's drafts are about to be made."""
        self.without_attention = without_attention
        self.metadata = None
        self.bounds = bounds

    def run(self, offset: int, token_ids: Tensor) -> CutState:
        """Run the layers before the step's exit on a token of each staged request, and
        keep its state for the next step; rows of padding write no KV.

        Args:
            offset: of the tokens from the newest ones; 0 first.
            token_ids: [requests] int64; INVALID ones run as token 0.

        Returns:
            (hidden, residual) at the exit layer, [requests, hidden] each; arbitrary in
            rows that may not draft so far.
        """
        requests = len(token_ids)
        staged = self.speculator.staging.staged
        limit = self.max_model_len
        if offset == 0:
            # Once for all passes: each operation is a node of their CUDA graph.
            # [offsets, requests] positions, without a limit
            self.wanted = staged.positions[:requests] + self.offsets
            # [offsets, requests] rows that write KV, else -1
            self.writers = torch.where(
                self.wanted < limit, staged.rows[:requests], self.no_row
            )
        # Compiled stacks have no guards: ids must look exactly as vLLM's own do.
        input_ids = self.buffers.input_ids[:requests]
        positions = self.buffers.positions[:requests]
        torch.maximum(token_ids, self.zero, out=input_ids)
        torch.clamp(self.wanted[offset], max=limit - 1, out=positions)
        torch.add(positions, 1, out=self.buffers.seq_lens[:requests])
        slots = None
        if not self.without_attention:
            mappings = self.speculator.block_tables.compute_slot_mappings(
                self.writers[offset],
                self.starts[: requests + 1],
                positions,
                requests,
            )
            slots = build_slot_mappings_by_layer(
                mappings, self.speculator.kv_cache_config
            )
            self._bring_up_to_date(offset, requests, mappings)
        with (
            unseen_by_connectors(),
            set_forward_context(
                self.metadata,
                self.vllm_config,
                num_tokens=requests,
                slot_mapping=slots,
            ),
        ):
            state = self.cut.shallow(input_ids, positions)
        deferred = self.speculator.deferred
        # -1 for padding, whose states are the last request's
        rows = staged.rows[:requests]
        deferred.saved.store(rows, state, deferred.width, offset)
        return state

    def _bring_up_to_date(
        self, offset: int, requests: int, mappings: Tensor
    ) -> None:
        """Metadata of the next pass, made once per step unless a backend's cannot be
        updated in place.
        """
        if self.metadata is not None and self.capturable:
            for groups in self.speculator.attn_groups:
                for group in groups:
                    group.update_draft_decode_metadata(self.metadata)
            return
        longest = self.max_model_len
        bounds = self.bounds
        if bounds is not None:
            # Built once for all passes.
            reach = (
                self.speculator.num_speculative_steps
                if self.capturable
                else offset
            )
            bounds = (bounds[:requests] + reach + 1).clamp(max=longest)
            longest = int(bounds.numpy().max())
        tables = self.speculator.block_tables.input_block_tables
        # Inside a CUDA graph they are computed again at every replay, so vLLM's metadata
        # for capture are never used: some backends (Triton's) set the sequence lengths
        # to 1 there, and every replay would do so.
        self.metadata = build_attn_metadata(
            attn_groups=self.speculator.attn_groups,
            kv_cache_config=self.speculator.kv_cache_config,
            max_seq_len=longest,
            seq_lens_cpu_upper_bound=bounds,
            num_reqs=requests,
            num_tokens=requests,
            query_start_loc_gpu=self.starts[: requests + 1],
            query_start_loc_cpu=self.starts_cpu[: requests + 1],
            max_query_len=1,
            seq_lens=self.buffers.seq_lens[:requests],
            block_tables=[table[:requests] for table in tables],
            slot_mappings=mappings,
            positions=self.buffers.positions[:requests],
            is_prefilling=self.speculator.draft_is_prefilling[:requests],
        )


def on_device(groups: Iterable[Any]) -> bool:
    """Whether all attention groups update their metadata on the device; logs once if
    one on a GPU does not.
    """
    others = [
        group.backend.get_name()
        for group in groups
        if not updates_in_place(group.get_metadata_builder())
    ]
    if others and not is_cpu():
        logger.warning_once(
            "vllm-ppd: attention backend %s may copy sequence lengths to the host in "
            "every shallow pass, which then waits for the device and runs without a "
            "CUDA graph; unless the model has chunked layers, avoid this with "
            "--attention-backend FLASH_ATTN or TRITON_ATTN",
            others[0],
        )
    return not others


def updates_in_place(builder: Any) -> bool:
    """Whether a builder can update a decode pass's metadata for the next pass, and the
    update is of its own metadata.

    A derived builder may build other metadata and inherit an update that does not know
    of them: that of chunked local attention builds lengths and blocks of chunks, and
    its base class updates nothing, as it counts on sequence lengths that change in
    place.
    """
    if not builder.supports_draft_decode_metadata_update:
        return False
    kinds = type(builder).__mro__
    builds = next(kind for kind in kinds if "build" in vars(kind))
    updates = next(
        kind for kind in kinds if "update_draft_decode_metadata" in vars(kind)
    )
    return issubclass(updates, builds)

# SPDX-License-Identifier: Apache-2.0
"""Passes of the target's first stack outside of vLLM's own step on runner V2, into the
target's paged KV cache.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
)

from vllm_ppd.model_patches.base import CutState, ModelCut
from vllm_ppd.vllm_plugins.engine.outside_steps import on_device, unseen_by_connectors


class PassInputs(NamedTuple):
    """Fixed buffers for a pass over one token per request; every field is [requests]."""

    input_ids: torch.Tensor  # int32, as in vLLM
    positions: torch.Tensor  # int64, within the model's length
    seq_lens: torch.Tensor  # int32
    # int64, request rows that write KV; -1 where none is to be written
    writing: torch.Tensor

    def fill(
        self,
        rows: torch.Tensor,
        newest: torch.Tensor,
        token_ids: torch.Tensor,
        offset: int,
        max_model_len: int,
    ) -> None:
        """Fill in the tokens that are some places after the newest ones.

        Args:
            rows: [requests] int64, request rows; -1 for padding.
            newest: [requests] int64, positions of the newest tokens.
            token_ids: [requests] int64; INVALID ones run as token 0.
            offset: places after the newest tokens.
            max_model_len: the length past which no KV is written.
        """
        requests = len(rows)
        wanted = torch.where(rows < 0, 0, newest + offset)
        positions = wanted.clamp(max=max_model_len - 1)
        self.input_ids[:requests] = token_ids.clamp(min=0)
        self.positions[:requests] = positions
        self.seq_lens[:requests] = positions + 1
        self.writing[:requests] = torch.where(wanted < max_model_len, rows, -1)


class FirstStackPasses:
    """One token per request between steps, and the tokens of some requests within one.

    Args:
        speculator: our speculator, which stages the requests.
        cut: of the target.
    """

    def __init__(self, speculator: Any, cut: ModelCut) -> None:
        self.speculator = speculator
        self.cut = cut
        self.vllm_config: Any = speculator.vllm_config
        self.device = speculator.device
        self.max_model_len: int = speculator.max_model_len
        most = speculator.max_num_reqs
        self.starts_cpu = torch.arange(most + 1, dtype=torch.int32)
        self.starts = self.starts_cpu.to(self.device)
        self.prefilling = torch.zeros(most, dtype=torch.bool)
        types = (torch.int32, torch.int64, torch.int32, torch.int64)
        self.inputs = PassInputs(
            *(torch.zeros(most, dtype=dtype, device=self.device) for dtype in types)
        )
        # [requests] bounds of sequence lengths; None while capturing a graph
        self.bounds: torch.Tensor | None = None
        self.without_attention = False
        # Whether metadata are updated in place, so that a CUDA graph may contain the
        # passes
        self.capturable = False
        self.kv_cache_config: Any = None
        self.batch: Any = None  # batch of the current mixed step
        # Attention metadata of the current drafting passes
        self.metadata: dict[str, Any] | None = None

    def bind(self, kv_cache_config: Any, block_tables: Any) -> None:
        """Bind the KV cache and its attention groups; an engine has none while vLLM
        measures its memory.
        """
        self.capturable = on_device(
            group for groups in self.speculator.attn_groups for group in groups
        )
        self.kv_cache_config = kv_cache_config
        self.block_tables = block_tables
        # vLLM may have reduced it to what fits
        self.max_model_len = self.vllm_config.model_config.max_model_len

    # Between steps --------------------------------------------------------------------

    def rows(self, requests: int) -> torch.Tensor:
        """Request rows of the staged requests [requests] int64, -1 for padding."""
        rows: torch.Tensor = self.speculator.staging.rows[:requests]
        return rows

    def begin_drafting(self, batch: Any, without_attention: bool) -> None:
        """A step's drafts are about to be made."""
        self.without_attention = without_attention
        self.metadata = None
        self.bounds = batch.seq_lens_cpu_upper_bound

    def prepare_capture(self, requests: int) -> None:
        """Prepare the capture of a graph for a number of requests, whose blocks are
        vLLM's null block.
        """
        self.without_attention = False
        self.bounds = None
        self.metadata = None
        self.block_tables.get_dummy_block_tables(requests)

    def one_token(self, offset: int, token_ids: torch.Tensor) -> CutState:
        """The first stack on a token of each staged request; rows of padding write no KV."""
        requests = len(token_ids)
        newest = self.speculator.staging.positions[:requests]
        inputs = self.inputs
        inputs.fill(self.rows(requests), newest, token_ids, offset, self.max_model_len)
        positions = inputs.positions[:requests]
        slots = None
        if not self.without_attention:
            starts = self.starts[: requests + 1]
            mappings = self.block_tables.compute_slot_mappings(
                inputs.writing[:requests], starts, positions, requests
            )
            slots = build_slot_mappings_by_layer(mappings, self.kv_cache_config)
            self._bring_up_to_date(offset, requests, mappings)
        with (
            unseen_by_connectors(),
            set_forward_context(
                self.metadata, self.vllm_config, num_tokens=requests, slot_mapping=slots
            ),
        ):
            # Compiled stacks have no guards: ids must look exactly as vLLM's own do.
            input_ids = inputs.input_ids[:requests]
            state: CutState = self.cut.start(
                self.cut.stacks[0], input_ids, positions, self.cut.embeddings(input_ids)
            )
            return state

    def _bring_up_to_date(
        self, offset: int, requests: int, mappings: torch.Tensor
    ) -> None:
        """Metadata of the next pass, made once per step unless a backend's cannot be
        updated in place.
        """
        if self.metadata is not None and self.capturable:
            for groups in self.speculator.attn_groups:
                for group in groups:
                    group.update_draft_decode_metadata(self.metadata)
            return
        bounds = self.bounds
        if bounds is not None:
            # Built once for all passes.
            reach = self.speculator.num_speculative_steps if self.capturable else offset
            bounds = (bounds[:requests] + reach + 1).clamp(max=self.max_model_len)
        self.metadata = self._metadata(
            self.starts[: requests + 1],
            self.starts_cpu[: requests + 1],
            1,
            self.inputs.seq_lens[:requests],
            bounds,
            [table[:requests] for table in self.block_tables.input_block_tables],
            mappings,
            self.inputs.positions[:requests],
            self.prefilling[:requests],
        )

    def _metadata(
        self,
        starts: torch.Tensor,
        starts_cpu: torch.Tensor,
        longest: int,
        seq_lens: torch.Tensor,
        bounds: torch.Tensor | None,
        tables: list[torch.Tensor],
        slots: torch.Tensor,
        positions: torch.Tensor,
        prefilling: torch.Tensor,
    ) -> dict[str, Any]:
        """Metadata of the first stack's layers; inside a CUDA graph they are computed
        again at every replay.

        So vLLM's metadata for capture are never used: some backends (Triton's) set the
        sequence lengths to 1 there, and every replay would do so.
        """
        return build_attn_metadata(
            attn_groups=self.speculator.attn_groups,
            num_reqs=len(seq_lens),
            num_tokens=len(positions),
            query_start_loc_gpu=starts,
            query_start_loc_cpu=starts_cpu,
            max_query_len=longest,
            seq_lens=seq_lens,
            max_seq_len=self.max_model_len
            if bounds is None
            else int(bounds.numpy().max()),
            block_tables=tables,
            slot_mappings=slots,
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=bounds,
            positions=positions,
            is_prefilling=prefilling,
        )

    # Within a step --------------------------------------------------------------------

    def begin_step(self, batch: Any) -> None:
        """Prepare a mixed step."""
        self.batch = batch

    def of_requests(
        self,
        requests: np.ndarray,
        index: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> CutState:
        """The first stack over every token of some requests.

        Args:
            requests: places in the batch.
            index: [tokens] indices of their tokens in the step.
            input_ids, positions: [tokens of the step].

        Returns:
            States, [tokens, hidden].
        """
        batch = self.batch
        self.batch = None
        lengths = batch.num_scheduled_tokens[requests]
        starts = np.zeros(len(requests) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        places = async_tensor_h2d(requests, device=self.device)
        token_positions = positions.index_select(0, index)
        mappings = self.block_tables.slot_mappings.index_select(1, index)
        metadata = self._metadata(
            async_tensor_h2d(starts, device=self.device),
            torch.from_numpy(starts),
            int(lengths.max()),
            batch.seq_lens.index_select(0, places),
            batch.seq_lens_cpu_upper_bound[requests],
            [
                table.index_select(0, places)
                for table in self.block_tables.input_block_tables
            ],
            mappings,
            token_positions,
            torch.from_numpy(batch.is_prefilling_np[requests]),
        )
        slots = build_slot_mappings_by_layer(mappings, self.kv_cache_config)
        with set_forward_context(
            metadata, self.vllm_config, num_tokens=len(index), slot_mapping=slots
        ):
            state: CutState = self.cut.stacks[0](
                input_ids.index_select(0, index), token_positions
            )
        return state

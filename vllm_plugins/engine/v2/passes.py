# SPDX-License-Identifier: Apache-2.0
"""Running the target's first stack outside vLLM's own step on runner V2, into the target's own paged KV cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer

from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.engine.attention_backends import on_device
from vllm_ppd.vllm_plugins.engine.kv_connector import unseen_by_connectors


class FirstStackPasses:
    """One token a request between steps, and the tokens of some requests within one.

    Args:
        speculator: whose batch it is.
    """

    def __init__(self, speculator: Any) -> None:
        self.speculator = speculator
        self.vllm_config: Any = speculator.vllm_config
        self.device = speculator.device
        self.max_model_len: int = speculator.max_model_len
        most = speculator.max_num_reqs
        self.starts_cpu = torch.arange(most + 1, dtype=torch.int32)
        self.starts = self.starts_cpu.to(self.device)
        self.prefilling = torch.zeros(most, dtype=torch.bool)
        self.positions = torch.zeros(most, dtype=torch.int64, device=self.device)
        self.seq_lens = torch.zeros(most, dtype=torch.int32, device=self.device)
        self.bounds: torch.Tensor | None = None  # [requests] of the sequences' lengths; None while a graph is captured
        self.without_attention = False
        self.kv_cache_config: Any = None
        self.chosen: Any = None  # what a mixed step's first stack runs over

    def bind(self, kv_cache_config: Any, block_tables: Any) -> None:
        """Take the KV cache; an engine has none while vLLM measures its memory."""
        self.kv_cache_config, self.block_tables = kv_cache_config, block_tables

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph may hold passes whose positions advance."""
        return on_device(group.backend.get_name() for some in self.speculator.attn_groups for group in some)

    # Between steps ---------------------------------------------------------------------------------------------------

    def begin(self, batch: Any, without_attention: bool) -> None:
        """A step's drafts are about to be made."""
        self.without_attention = without_attention
        self.bounds = batch.seq_lens_cpu_upper_bound

    def prepare_capture(self, requests: int) -> None:
        """A graph of so many requests is about to be captured: nobody's, whose blocks are vLLM's null block."""
        self.without_attention, self.bounds = False, None
        self.block_tables.get_dummy_block_tables(requests)

    def one_token(
        self,
        offset: int,
        token_ids: torch.Tensor,  # [requests] int64
        rows: torch.Tensor,  # [requests] request rows; -1 writes no KV
        base: torch.Tensor,  # [requests] positions of the newest tokens
    ) -> CutState:
        """The first stack on one token a request."""
        requests = len(token_ids)
        wanted = torch.where(rows < 0, 0, base + offset)
        positions = torch.clamp(wanted, max=self.max_model_len - 1, out=self.positions[:requests])
        metadata, slots = None, None
        if not self.without_attention:
            seq_lens = self.seq_lens[:requests]
            seq_lens.copy_(positions + 1)
            # Behind the model's length nothing is written.
            writing = torch.where(wanted < self.max_model_len, rows, -1)
            mappings = self.block_tables.compute_slot_mappings(
                writing, self.starts[: requests + 1], positions, requests
            )
            tables = [table[:requests] for table in self.block_tables.input_block_tables]
            bounds = (
                None if self.bounds is None else (self.bounds[:requests] + offset + 1).clamp(max=self.max_model_len)
            )
            metadata = self._metadata(
                self.starts[: requests + 1],
                self.starts_cpu[: requests + 1],
                1,
                seq_lens,
                bounds,
                tables,
                mappings,
                positions,
                self.prefilling[:requests],
            )
            slots = build_slot_mappings_by_layer(mappings, self.kv_cache_config)
        with (
            unseen_by_connectors(),
            set_forward_context(metadata, self.vllm_config, num_tokens=requests, slot_mapping=slots),
        ):
            # Compiled stacks have no guards: ids must look exactly as vLLM's own do.
            return self.speculator.cut.stacks[0](token_ids.to(torch.int32), positions)

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
        """Of the first stack's layers; inside a CUDA graph it is made anew from the same buffers at every replay.

        Hence never vLLM's metadata for capture: some backends (Triton's) set the sequence lengths to 1 for it, which
        every replay would then do.
        """
        return build_attn_metadata(
            attn_groups=self.speculator.attn_groups,
            num_reqs=len(seq_lens),
            num_tokens=len(positions),
            query_start_loc_gpu=starts,
            query_start_loc_cpu=starts_cpu,
            max_query_len=longest,
            seq_lens=seq_lens,
            max_seq_len=self.max_model_len if bounds is None else int(bounds.numpy().max()),
            block_tables=tables,
            slot_mappings=slots,
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=bounds,
            positions=positions,
            is_prefilling=prefilling,
        )

    # Within a step ---------------------------------------------------------------------------------------------------

    def choose(self, batch: Any, requests: np.ndarray, starts: np.ndarray) -> None:
        """Note the requests of the step about to run that of_requests will run over.

        Args:
            batch: vLLM's.
            requests: places in the batch.
            starts: [requests of the batch] the first token of each.
        """
        lengths = batch.num_scheduled_tokens[requests]
        first = np.zeros(len(requests) + 1, dtype=np.int32)
        np.cumsum(lengths, out=first[1:])
        tokens = np.repeat(starts[requests] - first[:-1], lengths) + np.arange(first[-1])
        self.chosen = (batch, first, int(lengths.max()), async_tensor_h2d(tokens.astype(np.int64), device=self.device))

    def of_requests(
        self,
        requests: np.ndarray,
        input_ids: torch.Tensor,  # [tokens of the step]
        positions: torch.Tensor,  # [tokens of the step]
    ) -> tuple[torch.Tensor, CutState]:
        """The first stack over every token of some requests: (the tokens' places in the step, their states)."""
        batch, first, longest, tokens = self.chosen
        self.chosen = None
        index = async_tensor_h2d(requests, device=self.device)
        first_cpu = torch.from_numpy(first)
        own_positions = positions.index_select(0, tokens)
        mappings = self.block_tables.slot_mappings.index_select(1, tokens)
        metadata = self._metadata(
            async_tensor_h2d(first, device=self.device),
            first_cpu,
            longest,
            batch.seq_lens.index_select(0, index),
            batch.seq_lens_cpu_upper_bound[requests],
            [table.index_select(0, index) for table in self.block_tables.input_block_tables],
            mappings,
            own_positions,
            torch.from_numpy(batch.is_prefilling_np[requests]),
        )
        slots = build_slot_mappings_by_layer(mappings, self.kv_cache_config)
        with set_forward_context(metadata, self.vllm_config, num_tokens=len(tokens), slot_mapping=slots):
            state: Any = self.speculator.cut.stacks[0](input_ids.index_select(0, tokens), own_positions)
        return tokens, state

# SPDX-License-Identifier: Apache-2.0
"""Passes of a stage's layers outside of vLLM's own forward, into vLLM's paged KV cache."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
)

from vllm_ppd.model_patches.base import CutState, ModelCut, rows_of


class StagePasses:
    """Runs stacks of a stage.

    Args:
        runner: vLLM's model runner V2, whose block tables, metadata builders and graphs
            are used.
        cut: of the stage.
    """

    def __init__(self, runner: Any, cut: ModelCut) -> None:
        self.runner = runner
        self.cut = cut

    def first(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        blocks: Tensor,
        token_ids: Tensor,
    ) -> CutState:
        """Stack 0 over a token each of some requests, which may repeat with last blocks
        of their own: the states at its end.

        Args:
            rows: [tokens] request rows of vLLM's block tables.
            positions: [tokens] int64.
            blocks: [tokens, KV cache groups] int32, which hold the tokens.
            token_ids: [tokens].
        """
        # Compiled stacks have no guards: IDs need exactly the layout of vLLM's.
        ids = token_ids.to(torch.int32).contiguous()
        return self._run(0, rows, positions, blocks, ids)

    def last(
        self, rows: np.ndarray, positions: np.ndarray, state: CutState
    ) -> Any:
        """The stage's last stack over tokens, from states at the end of the one before
        it; rows and positions as in first.

        Returns:
            States on the first stage, normed hidden states [tokens, hidden] on the
            last.
        """
        return self._run(-1, rows, positions, None, *state)

    def _run(
        self,
        level: int,
        rows: np.ndarray,
        positions_np: np.ndarray,
        blocks: Tensor | None,
        *inputs: Tensor | None,
    ) -> Any:
        runner = self.runner
        count = len(rows)
        graph = runner.cudagraph_manager.dispatch(count, count, 1, 0)
        positions = async_tensor_h2d(positions_np, device=runner.device)
        tables, slots = self._blocks(rows, positions, blocks, graph.num_tokens)
        buffers = runner.input_buffers
        arguments: tuple[Any, ...] = (positions, *inputs)
        places: tuple[Any, ...] = (
            buffers.positions,
            *(self.cut.graph_buffers or ()),
        )
        if level == 0:
            arguments = (*inputs, positions)
            places = (buffers.input_ids, buffers.positions)
        if graph.cg_mode != CUDAGraphMode.NONE:
            # A captured graph reads its inputs where vLLM keeps them.
            arguments = tuple(
                _padded(argument, place, graph.num_tokens)
                for argument, place in zip(arguments, places, strict=True)
            )
        with set_forward_context(
            self._metadata(positions_np, positions, tables, slots),
            runner.vllm_config,
            num_tokens=graph.num_tokens,
            cudagraph_runtime_mode=graph.cg_mode,
            batch_descriptor=BatchDescriptor(num_tokens=graph.num_tokens),
            slot_mapping=build_slot_mappings_by_layer(
                slots, runner.kv_cache_config
            ),
        ):
            output = self.cut.stacks[level](*arguments)
        if isinstance(output, Tensor):
            return output[:count]
        return rows_of(output, slice(count))

    def _blocks(
        self,
        rows: np.ndarray,
        positions: Tensor,
        blocks: Tensor | None,
        padded: int,
    ) -> tuple[list[Tensor], Tensor]:
        """Block tables [tokens, blocks] of each KV cache group, with blocks of the tokens'
        own in their places, and KV slots [groups, padded].
        """
        block_tables = self.runner.block_tables
        index = async_tensor_h2d(rows, device=self.runner.device)
        tables = []
        slots = []
        groups = zip(
            block_tables.block_tables, block_tables.block_sizes, strict=True
        )
        for group, (staged, size) in enumerate(groups):
            table = staged.gpu.index_select(0, index)
            columns = (positions // size)[:, None]
            if blocks is not None:
                table.scatter_(1, columns, blocks[:, group, None])
            held = table.gather(1, columns)[:, 0].long()
            tables.append(table)
            slots.append(held * size + positions % size)
        padding = 0, padded - len(positions)
        padded_slots = functional.pad(
            torch.stack(slots), padding, value=PAD_SLOT_ID
        )
        return tables, padded_slots

    def _metadata(
        self,
        positions_np: np.ndarray,
        positions: Tensor,
        tables: list[Tensor],
        slots: Tensor,
    ) -> dict[str, Any]:
        """Attention metadata by layer name, with every token as a request of its own."""
        runner = self.runner
        count = len(positions)
        starts = torch.arange(count + 1, dtype=torch.int32)
        lengths = torch.from_numpy(positions_np.astype(np.int32) + 1)
        return build_attn_metadata(
            attn_groups=runner.attn_groups,
            num_reqs=count,
            num_tokens=count,
            query_start_loc_gpu=starts.to(runner.device, non_blocking=True),
            query_start_loc_cpu=starts,
            max_query_len=1,
            seq_lens=lengths.to(runner.device, non_blocking=True),
            max_seq_len=int(lengths.max()),
            block_tables=tables,
            slot_mappings=slots,
            kv_cache_config=runner.kv_cache_config,
            seq_lens_cpu_upper_bound=lengths,
            positions=positions,
            is_prefilling=torch.zeros(count, dtype=torch.bool),
        )


def _padded(values: Tensor, buffer: Tensor, size: int) -> Tensor:
    """Values [tokens, ...] at the start of a buffer, with zeros up to a size."""
    buffer[: len(values)].copy_(values)
    buffer[len(values) : size].zero_()
    return buffer[:size]

# SPDX-License-Identifier: Apache-2.0
"""When DynaMo's heads rest, and which KV blocks lack their KV because of it.

Above the hard cut-off nobody drafts, nor does anybody while drafts do not pay, so the heads' layers are left out of a
step of decoding. Its tokens then have no KV in those layers: their blocks have holes, and whoever reads them, by the
same request or by a prefix-cache hit, does not draft. A block is whole again once it is taken anew. Where no request of
a step could draft, the heads rest, too.

In a step that takes prompts in they never rest: a prompt may be the beginning of many others', which would then not
draft until its blocks are given away.

Nothing is looked at until a step has rested for the first time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import get_kv_cache_spec_sliding_window

from vllm_ppd.vllm_plugins.states import flat_ranges


class BlockTable(NamedTuple):
    """The batch's blocks in one KV cache group."""

    blocks: np.ndarray  # [rows, blocks] ids, in the order of the positions
    block_size: int  # tokens
    window: int | None  # tokens that the layers attend to; None: all

    def between(self, first: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Ids of the blocks of columns [first, end) of each row, in one array."""
        counts = end - first
        return self.blocks[np.repeat(np.arange(len(counts)), counts), flat_ranges(first, counts)]


class HeadsHistory:
    """Says of each step whether the heads rest, and of each batch row whether the heads know all of its past.

    Args:
        runner: vLLM's model runner; its KV cache may come later.
        first_layer: number of the heads' first layer.
        most_requests: the hard cut-off (None: there is none).
    """

    def __init__(self, runner: Any, first_layer: int, most_requests: int | None) -> None:
        self.runner = runner
        self.first_layer = first_layer
        self.most_requests = most_requests
        self.whole: np.ndarray | None = None  # [KV blocks] bool; None: all, as no step has rested yet
        self.known: np.ndarray | None = None  # [batch rows] bool, after the step that runs now; None: all
        self._groups: list[tuple[int, int | None]] = []  # the heads' KV cache groups, and the window of each

    def begin_step(self, paused: bool = False) -> bool:
        """Take in the step that is about to run; returns whether the heads rest in it.

        Args:
            paused: whether drafts that could be made do not pay.
        """
        batch = self.runner.input_batch
        rows = batch.num_reqs
        crowded = self.most_requests is not None and rows > self.most_requests
        starts = batch.num_computed_tokens_cpu[:rows].astype(np.int64)
        decoding = self._decoding(starts)
        if self.whole is None:
            if not ((crowded or paused) and decoding):
                return False
            self.whole = np.ones(self.runner.kv_cache_config.num_blocks, dtype=bool)
            self._groups = self._find_groups()
        ends = starts + np.diff(self.runner.query_start_loc.np[: rows + 1])
        tables = [self._table(gid, window) for gid, window in self._groups]
        for table in tables:
            # Before anyone is looked at: a block that one request fills may be another's prefix in the same step.
            self.whole[table.between(-(-starts // table.block_size), -(-ends // table.block_size))] = True
        self.known = np.zeros(rows, dtype=bool)
        if not crowded:
            self.known = np.logical_and.reduce([self._whole_rows(table, starts) for table in tables])
        if not decoding or (self.known.any() and not paused):
            return False
        self.known[:] = False  # of the tokens that this step takes in
        for table in tables:
            self.whole[table.between(starts // table.block_size, -(-ends // table.block_size))] = False
        return True

    def _decoding(self, starts: np.ndarray) -> bool:
        """Whether every row takes in its last token, one that it emitted, and drafts at most.

        A single token of a prompt is a prompt, and so is what a request that was preempted computes again.
        """
        batch, rows = self.runner.input_batch, len(starts)
        return bool((starts >= np.maximum(batch.num_prompt_tokens[:rows], batch.num_tokens_no_spec[:rows] - 1)).all())

    def _whole_rows(self, table: BlockTable, starts: np.ndarray) -> np.ndarray:
        """Rows of which every block that the token at `starts` attends to is whole: [rows] bool."""
        assert self.whole is not None
        size, window = table.block_size, table.window
        end = -(-starts // size)
        # Blocks before the window may be another request's by now.
        first = np.zeros_like(end) if window is None else np.maximum(starts + 1 - window, 0) // size
        columns = np.arange(end.max(initial=0))
        unseen = (columns < first[:, None]) | (columns >= end[:, None])
        return (self.whole[table.blocks[:, : len(columns)]] | unseen).all(axis=1)

    def _table(self, gid: int, window: int | None) -> BlockTable:
        batch = self.runner.input_batch
        table = batch.block_table[gid]
        return BlockTable(table.get_numpy_array()[: batch.num_reqs], table.block_size, window)

    def _find_groups(self) -> list[tuple[int, int | None]]:
        return [
            (gid, get_kv_cache_spec_sliding_window(group.kv_cache_spec))
            for gid, group in enumerate(self.runner.kv_cache_config.kv_cache_groups)
            if any(extract_layer_index(name) >= self.first_layer for name in group.layer_names)
        ]

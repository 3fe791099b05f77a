# SPDX-License-Identifier: Apache-2.0
"""When DynaMo's heads rest, and which KV blocks lack their KV because of it.

Above the hard cut-off nobody drafts, nor does anybody while drafts do not pay, so the heads' layers are left out of a
step of decoding. Its tokens then have no KV in those layers: their blocks have holes, and whoever reads them, by the
same request or by a prefix-cache hit, does not draft. A block is whole again once it is taken anew. Where no request of
a step could draft, the heads rest, too.

While drafts do not pay, the states of the tokens that the heads miss are kept (heads_backlog.py): a request that is to
draft again gets its KV completed first. Above the cut-off, where many requests decode for long, they are not.

In a step that takes prompts in they never rest: a prompt may be the beginning of many others', which would then not
draft until its blocks are given away.

Nothing is looked at until a step has rested for the first time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import get_kv_cache_spec_sliding_window

from vllm_ppd.model_patches.base import CutState, copied, rows_of
from vllm_ppd.vllm_plugins.heads_backlog import HeadsBacklog
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


class Missed(NamedTuple):
    """Tokens that the heads have not seen, of those that they attend to, ordered by row and position."""

    rows: np.ndarray  # [tokens] batch row
    positions: np.ndarray  # [tokens]
    state: CutState  # [tokens, hidden]


class HeadsHistory:
    """Says of each step whether the heads rest, and of each batch row whether the heads know all of its past.

    Args:
        runner: vLLM's model runner; its KV cache may come later.
        first_layer: number of the heads' first layer.
        most_requests: the hard cut-off (None: there is none).
        backlog: takes the states of what the heads miss.
    """

    def __init__(self, runner: Any, first_layer: int, most_requests: int | None, backlog: HeadsBacklog) -> None:
        self.runner = runner
        self.first_layer = first_layer
        self.most_requests = most_requests
        self.backlog = backlog
        self.keeping: np.ndarray | None = None  # [batch rows] bool, whose state is to be kept; None: nobody's
        self.whole: np.ndarray | None = None  # [KV blocks] bool; None: all, as no step has rested yet
        self.known: np.ndarray | None = None  # [batch rows] bool, up to what the step takes in now; None: all
        self._groups: list[int] = []  # the heads' KV cache groups
        self._window: int | None = None  # of the heads, which are layers of one kind
        # Of the last step, if the heads rested in it in a pause: whose it was, and where each of them goes on.
        self._resting: tuple[list[str], np.ndarray] | None = None

    def forget(self, req_ids: list[str]) -> None:
        """These are new, or their KV blocks are others than before."""
        if req_ids:
            self.backlog.forget(req_ids)
            self._resting = None

    def begin_step(self, paused: bool = False, keeps: bool = True) -> bool:
        """Take in the step that is about to run; returns whether the heads rest in it.

        Args:
            paused: whether drafts that could be made do not pay.
            keeps: whether what the heads miss in a pause may be completed later.
        """
        batch = self.runner.input_batch
        rows = batch.num_reqs
        crowded = self.most_requests is not None and rows > self.most_requests
        starts = batch.num_computed_tokens_cpu[:rows].astype(np.int64)
        if paused and self._rests_on(starts, keeps):
            return True
        decoding, self._resting = self._decoding(starts), None
        self.keeping = None
        if self.whole is None:
            if not ((crowded or paused) and decoding):
                return False
            self.whole = np.ones(self.runner.kv_cache_config.num_blocks, dtype=bool)
            self._groups, self._window = self._find_groups()
        ends = starts + np.diff(self.runner.query_start_loc.np[: rows + 1])
        tables = [self._table(gid) for gid in self._groups]
        for table in tables:
            # Before anyone is looked at: a block that one request fills may be another's prefix in the same step.
            self.whole[table.between(-(-starts // table.block_size), -(-ends // table.block_size))] = True
        self.known = np.zeros(rows, dtype=bool)
        if not crowded:
            self.known = np.logical_and.reduce([self._whole_rows(table, starts) for table in tables])
        several = ends - starts > 1
        rests = decoding and ((paused and not several.any()) or not self.known.any())
        # A state is kept of one token a step.
        self.backlog.forget([batch.req_ids[row] for row in np.flatnonzero(several)])
        behind = self.backlog.holds(batch.req_ids)
        if not keeps or (rests and crowded):
            self.backlog.forget(batch.req_ids)
        elif behind.any() or (rests and self.known.any()):
            # Who is behind needs the newest state even of a step with the heads, whose attention has met the holes.
            self.keeping = behind | (self.known & rests)
        if rests:
            self.known[:] = False
            for table in tables:
                self.whole[table.between(starts // table.block_size, -(-ends // table.block_size))] = False
            if not (crowded or several.any()):
                self._resting = list(batch.req_ids), ends
        return rests

    def _rests_on(self, starts: np.ndarray, keeps: bool) -> bool:
        """Whether a pause goes on for the same requests in the same blocks, and nothing is to be found out anew."""
        batch = self.runner.input_batch
        if self._resting is None or self._resting[0] != batch.req_ids or not np.array_equal(self._resting[1], starts):
            return False
        if self.runner.query_start_loc.np[len(starts)] > len(starts):
            return False
        if any((starts % batch.block_table[gid].block_size == 0).any() for gid in self._groups):
            return False
        behind = self.backlog.holds(batch.req_ids)
        if behind.any() and not keeps:
            return False
        self._resting = self._resting[0], starts + 1
        self.keeping = behind if behind.any() else None
        return True

    def keep(self, state: CutState) -> None:
        """Keep states of the step that ran.

        Args:
            state: of its tokens.
        """
        if self.keeping is None:
            return
        if self._resting is not None and self.keeping.all():  # every row has one token: nothing is to be looked up
            ids, ends = self._resting
            self.backlog.add(ids, ends - 1, copied(rows_of(state, slice(len(ids)))))
            return
        batch, kept = self.runner.input_batch, np.flatnonzero(self.keeping)
        index = torch.from_numpy(kept).to(state[0].device, non_blocking=True)
        last = self.runner.query_start_loc.gpu[1:].index_select(0, index).long() - 1
        ids = [batch.req_ids[row] for row in kept]
        self.backlog.add(ids, batch.num_computed_tokens_cpu[kept], rows_of(state, last))

    @property
    def able(self) -> np.ndarray | None:
        """Rows that can draft after this step, perhaps once they have caught up: [batch rows] bool; None: all."""
        return None if self.known is None else self.known | self.backlog.holds(self.runner.input_batch.req_ids)

    def catch_up(self, rows: np.ndarray) -> Missed | None:
        """What the heads have to compute before some rows may draft, who are whole from here on; None: nothing."""
        behind = rows if self.known is None else rows[~self.known[rows]]
        if self.known is None or not len(behind):
            return None
        assert self.whole is not None
        self._resting = None  # blocks are whole again, and have to be looked at if the next step rests
        batch = self.runner.input_batch
        whose, positions, state = self.backlog.take([batch.req_ids[row] for row in behind])
        first = np.full(len(behind), np.iinfo(np.int64).max)
        np.minimum.at(first, whose, positions)
        newest = batch.num_computed_tokens_cpu[behind].astype(np.int64)
        for gid in self._groups:
            table = self._table(gid)
            size, table = table.block_size, table._replace(blocks=table.blocks[behind])
            oldest = np.zeros_like(newest)
            if self._window is not None:
                oldest = np.maximum(newest + 1 - self._window, 0) // size
            self.whole[table.between(np.maximum(first // size, oldest), newest // size + 1)] = True
        self.known[behind] = True
        # Blocks before the window may be another request's by now.
        seen = np.flatnonzero(positions // size >= oldest[whose])
        index = torch.from_numpy(seen).to(state[0].device, non_blocking=True)
        return Missed(behind[whose[seen]], positions[seen], rows_of(state, index))

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

    def _table(self, gid: int) -> BlockTable:
        batch = self.runner.input_batch
        table = batch.block_table[gid]
        return BlockTable(table.get_numpy_array()[: batch.num_reqs], table.block_size, self._window)

    def _find_groups(self) -> tuple[list[int], int | None]:
        """The KV cache groups that the heads' layers are in, and the window of them all."""
        window_of = {
            gid: get_kv_cache_spec_sliding_window(group.kv_cache_spec)
            for gid, group in enumerate(self.runner.kv_cache_config.kv_cache_groups)
            if any(extract_layer_index(name) >= self.first_layer for name in group.layer_names)
        }
        (window,) = set(window_of.values())
        return list(window_of), window

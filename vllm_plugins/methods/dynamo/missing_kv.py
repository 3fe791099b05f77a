# SPDX-License-Identifier: Apache-2.0
"""Tracking of requests that lack KV of DynaMo's draft layers, after steps that skipped these layers.

The draft layers write their KV into the target's blocks in every step in which they run. The tokens of a skipped step
never get any ("missing KV"), so a request that had such a step does not draft again: verification would keep its output
right, but the draft layers would attend to whatever the blocks held before.

Full blocks enter the prefix cache, so each block carries a flag, and a request that starts from cached blocks has
missing KV if one of these has. A block is filled from its first slot on: the step that writes this slot resets the flag
of the block.
"""

from typing import Any

import numpy as np
from vllm.model_executor.models.utils import extract_layer_index

from vllm_ppd.vllm_plugins.engine.v1.passes import flat_ranges


class MissingKV:
    """Tracks missing KV by request and by block, without cost until the first skipped step.

    Args:
        runner: vLLM's model runner; its KV cache may be allocated later.
        first_layer: number of the first draft layer.
    """

    def __init__(self, runner: Any, first_layer: int) -> None:
        self.runner = runner
        self.first_layer = first_layer
        self.requests: set[str] = set()  # ids of requests with missing KV
        self._started: list[str] = []  # requests whose blocks have changed since the previous step
        # (number, [blocks] bool: KV is missing) of each KV cache group with draft layers.
        self._groups: list[tuple[int, np.ndarray]] = []

    def update_requests(self, scheduler_output: Any) -> None:
        """Forget finished requests, and reset new and resumed ones, for which their blocks decide."""
        new = [request.req_id for request in scheduler_output.scheduled_new_reqs]
        self._started = [*new, *scheduler_output.scheduled_cached_reqs.resumed_req_ids]
        self.requests.difference_update(scheduler_output.finished_req_ids, self._started)

    def begin_step(self, skipped: bool) -> None:
        """Record a step before it runs.

        Args:
            skipped: whether it skips the draft layers.
        """
        if not self._groups:
            if not skipped:
                return
            self._groups = self._find_groups()
        batch = self.runner.input_batch
        rows = batch.num_reqs
        starts = batch.num_computed_tokens_cpu[:rows].astype(np.int64)
        ends = starts + np.diff(self.runner.query_start_loc.np[: rows + 1])
        computed = np.array([batch.req_id_to_index[name] for name in self._started], dtype=np.int64)
        lacking = np.zeros(len(computed), dtype=bool)
        for gid, flags in self._groups:
            blocks, size = batch.block_table[gid].get_numpy_array(), batch.block_table[gid].block_size
            # If skipped, every written block; otherwise those whose first slot is written.
            first = starts // size if skipped else -(-starts // size)
            counts = -(-ends // size) - first
            flags[blocks[np.repeat(np.arange(rows), counts), flat_ranges(first, counts)]] = skipped
            # Only now, as a request may start from blocks that another request fills in this step.
            for place, row in enumerate(computed.tolist()):
                lacking[place] |= flags[blocks[row, : -(-starts[row] // size)]].any()
        self.requests.update(name for name, lacks in zip(self._started, lacking.tolist(), strict=True) if lacks)
        if skipped:
            self.requests.update(batch.req_ids)

    def everywhere(self) -> bool:
        """Whether every request of the batch has missing KV."""
        return bool(self.requests) and self.requests.issuperset(self.runner.input_batch.req_ids)

    def complete(self) -> np.ndarray | None:
        """[batch rows] bool, requests without missing KV; None: all."""
        if not self.requests:
            return None
        return np.array([name not in self.requests for name in self.runner.input_batch.req_ids], dtype=bool)

    def _find_groups(self) -> list[tuple[int, np.ndarray]]:
        config, tables = self.runner.kv_cache_config, self.runner.input_batch.block_table
        return [
            (gid, np.zeros(config.num_blocks * group.kv_cache_spec.block_size // tables[gid].block_size, dtype=bool))
            for gid, group in enumerate(config.kv_cache_groups)
            if any(extract_layer_index(name) >= self.first_layer for name in group.layer_names)
        ]

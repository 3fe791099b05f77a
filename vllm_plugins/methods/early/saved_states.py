# SPDX-License-Identifier: Apache-2.0
"""Saved states: what the shallow passes of one step leave for the deep pass of the next.

Rows are kept by (request, offset from its base token). A state is good for exactly the next step, and only for the
same request, position and token: whatever does not match falls back to the full forward.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.rows import load_rows, store_rows
from vllm_ppd.vllm_plugins.engine.v1.span_attention import flat_ranges


class SavedStates:
    """n+1 rows of (hidden, residual) a running request, preallocated.

    Args:
        max_requests: requests a batch holds at most.
        width: rows a request, the base token and n drafts: n + 1.
        hidden_size, dtype, device: those of the target's hidden states.
        has_residual: whether the family carries a residual stream beside the hidden states.
    """

    def __init__(
        self,
        max_requests: int,
        width: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        has_residual: bool,
    ) -> None:
        self.width = width
        rows = max_requests * width
        self.hidden = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        self.residual = torch.zeros_like(self.hidden) if has_residual else None
        self.base_position = np.zeros(max_requests, dtype=np.int64)  # of row 0 of each request
        self.count = np.zeros(max_requests, dtype=np.int64)  # rows that hold a state
        self.tokens = np.zeros((max_requests, width), dtype=np.int64)
        self.level = np.zeros((max_requests, width), dtype=np.int64)  # the stack that is to run next
        self.req_ids: list[str] | None = None  # request of each batch row when the states were made

    def clear(self) -> None:
        """Declare every state bad. (Their rows stay as they are until the next store.)"""
        self.req_ids = None
        self.count[:] = 0

    def store(
        self,
        rows: np.ndarray,  # [tokens] flat row numbers: request row * width + offset
        level: int,
        hidden: torch.Tensor,  # [tokens, hidden]
        residual: torch.Tensor | None,
    ) -> None:
        """Copy states in (vLLM's norms overwrite what they are given) and note the stack that is to run next."""
        index = torch.from_numpy(rows).to(self.hidden.device, non_blocking=True)
        stores, values = [self.hidden], [hidden]
        if self.residual is not None and residual is not None:
            stores, values = [self.hidden, self.residual], [hidden, residual]
        chosen(store_rows, index)(stores, index, values)
        self.level.reshape(-1)[rows] = level

    def keep(
        self,
        req_ids: list[str],  # of every batch row
        rows: np.ndarray,  # [requests] batch rows that have states
        base_positions: np.ndarray,  # [requests]
        tokens: np.ndarray,  # [requests, width] base token and drafts
        counts: np.ndarray,  # [requests] states of each
    ) -> None:
        """Declare the stored states good for the next step."""
        self.req_ids = list(req_ids)
        self.base_position[rows] = base_positions
        self.tokens[rows] = tokens
        self.count[rows] = counts

    def load(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copies of the states at flat row numbers: [tokens, hidden] each."""
        index = torch.from_numpy(rows).to(self.hidden.device, non_blocking=True)
        stores = [self.hidden] if self.residual is None else [self.hidden, self.residual]
        hidden, *residual = chosen(load_rows, index)(stores, index)
        return hidden, residual[0] if residual else None

    def match(
        self,
        req_ids: list[str],
        first_positions: np.ndarray,  # [requests] position of each request's first scheduled token
        query_lens: np.ndarray,  # [requests] scheduled tokens
        token_ids: np.ndarray,  # [tokens] scheduled tokens of all requests
    ) -> np.ndarray | None:
        """The flat row numbers of every scheduled token, or None if any of them has no state of its own."""
        if self.req_ids is None:
            return None
        if req_ids == self.req_ids:
            owners = np.arange(len(req_ids), dtype=np.int64)
        else:
            row_of = {req_id: row for row, req_id in enumerate(self.req_ids)}
            owners = np.array([row_of.get(req_id, -1) for req_id in req_ids], dtype=np.int64)
            if (owners < 0).any():
                return None
        if (self.base_position[owners] != first_positions).any() or (query_lens > self.count[owners]).any():
            return None
        rows = flat_ranges(owners * self.width, query_lens)
        return rows if (self.tokens.reshape(-1)[rows] == token_ids).all() else None

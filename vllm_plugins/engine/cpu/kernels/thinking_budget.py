# SPDX-License-Identifier: Apache-2.0
"""Kernels of sample/thinking_budget.py: where thinking begins and ends, and the end
that is forced.
"""

from typing import Any

import numpy as np
import torch

FORCED = 1.0e9  # logit


def update_committed_markers(
    rows: torch.Tensor,  # [requests]
    budgets: torch.Tensor,  # [request rows], below 0: none
    all_token_ids: torch.Tensor,  # [request rows, max_model_len]
    all_token_ids_stride: int,
    total_lens: torch.Tensor,  # [request rows]
    # [request rows] place of the latest start marker, -1: none
    last_starts: torch.Tensor,
    last_ends: torch.Tensor,  # [request rows] place of the latest end marker, -1: none
    scan_positions: torch.Tensor,  # [request rows] where the next search begins
    start_token_ids: torch.Tensor,  # [START_LEN]
    natural_end_token_ids: torch.Tensor,  # [NATURAL_END_LEN]
    START_LEN: int,
    NATURAL_END_LEN: int,
    MAX_LEN: int,
    **launch: Any,
) -> None:
    """Search the requests' new tokens for markers, and note the latest of each kind.

    vLLM's kernel does not note a marker that is blocks of tokens before the latest of
    the other kind. Only the order of the two matters.
    """
    markers = (start_token_ids.numpy(), natural_end_token_ids.numpy())
    tables = (last_starts.numpy(), last_ends.numpy())
    for row in rows.tolist():
        if int(budgets[row]) < 0:
            continue
        total_len = int(total_lens[row])
        scanned = int(scan_positions[row])
        if scanned > total_len:
            scanned = 0
            for table in tables:
                table[row] = -1
        text = all_token_ids.numpy()[row, scanned:total_len]
        for table, marker in zip(tables, markers, strict=True):
            places = occurrences(text, marker)
            if len(places):
                table[row] = scanned + places[-1]
        scan_positions[row] = max(total_len - (MAX_LEN - 1), 0)


def occurrences(text: np.ndarray, marker: np.ndarray) -> np.ndarray:
    """Where a marker begins in a text, ascending."""
    num_places = max(len(text) - len(marker) + 1, 0)
    matches = np.ones(num_places, dtype=bool)
    for offset, token in enumerate(marker):
        matches &= text[offset : offset + num_places] == token
    return np.flatnonzero(matches)


def apply_thinking_budget(
    logits: torch.Tensor,  # [logits, V] float32, changed in place
    logits_stride: int,
    rows: torch.Tensor,  # [logits]
    budgets: torch.Tensor,  # [request rows], below 0: none
    all_token_ids: torch.Tensor,  # [request rows, max_model_len]
    all_token_ids_stride: int,
    total_lens: torch.Tensor,  # [request rows]
    input_ids: torch.Tensor,  # [logits] the input token of each row of logits
    local_positions: torch.Tensor,  # [logits] index among the request's rows of logits
    last_starts: torch.Tensor,  # [request rows]
    last_ends: torch.Tensor,  # [request rows]
    start_token_ids: torch.Tensor,  # [START_LEN]
    natural_end_token_ids: torch.Tensor,  # [NATURAL_END_LEN]
    end_token_ids: torch.Tensor,  # [END_LEN] the marker that is forced
    START_LEN: int,
    NATURAL_END_LEN: int,
    END_LEN: int,
) -> None:
    """Force the end marker's next token where a text, with the drafts before, has used
    its budget.
    """
    inputs = input_ids.numpy()
    start_marker = start_token_ids.numpy()
    natural_end = natural_end_token_ids.numpy()
    forced_end = end_token_ids.numpy()
    for place, (row, local) in enumerate(
        zip(rows.tolist(), local_positions.tolist(), strict=True)
    ):
        budget = int(budgets[row])
        if budget < 0:
            continue
        total_len = int(total_lens[row])
        committed = all_token_ids.numpy()[row, :total_len]
        text = np.concatenate((committed, inputs[place - local + 1 : place + 1]))
        last_start = latest_with_drafts(
            text, total_len, start_marker, int(last_starts[row])
        )
        last_end = latest_with_drafts(text, total_len, natural_end, int(last_ends[row]))
        if last_start < 0 or last_start <= last_end:
            continue
        if len(text) - (last_start + START_LEN) < budget:
            continue
        begun = num_begun(text, forced_end)
        logits[place, int(forced_end[begun])] = FORCED


def latest_with_drafts(
    text: np.ndarray, total_len: int, marker: np.ndarray, cached: int
) -> int:
    """The latest place of a marker; those that end within the committed text are known."""
    first = max(total_len - len(marker) + 1, 0)
    places = occurrences(text[first:], marker)
    return first + int(places[-1]) if len(places) else cached


def num_begun(text: np.ndarray, marker: np.ndarray) -> int:
    """How many of a marker's tokens a text ends with, all but its last at most."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if (text[len(text) - length :] == marker[:length]).all():
            return length
    return 0

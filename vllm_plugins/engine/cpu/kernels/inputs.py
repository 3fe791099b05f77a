# SPDX-License-Identifier: Apache-2.0
"""Kernels of input_batch.py: a step's inputs, and what the requests' tables keep of its tokens."""

from typing import Any

import numpy as np
import torch

from vllm_ppd.vllm_plugins.engine.cpu.kernels.arrays import spans


def prepare_prefill_inputs(
    input_ids: torch.Tensor,  # [tokens]
    next_prefill_tokens: torch.Tensor,  # [num_lookahead, request rows]
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    rows: torch.Tensor,  # [requests]
    query_start_loc: torch.Tensor,  # [requests + 1 or more]
    all_token_ids: torch.Tensor,  # [request rows, max_model_len]
    all_token_ids_stride: int,
    prefill_lens: torch.Tensor,  # [request rows]
    num_computed: torch.Tensor,  # [request rows]
    **launch: Any,
) -> None:
    """Copy the tokens of requests within their prompt, and those that follow, 0 after its end."""
    rows_np = rows.numpy()
    starts = query_start_loc.numpy()
    tokens = all_token_ids.numpy()
    upcoming = next_prefill_tokens.numpy()
    ids = input_ids.numpy()
    computed = num_computed.numpy()[rows_np]
    lengths = prefill_lens.numpy()[rows_np]
    for request in np.flatnonzero(computed < lengths).tolist():
        row = rows_np[request]
        start = int(starts[request])
        end = int(starts[request + 1])
        begin = int(computed[request])
        next_begin = begin + end - start
        ids[start:end] = tokens[row, begin:next_begin]
        following = tokens[
            row, next_begin : min(next_begin + num_lookahead, int(lengths[request]))
        ]
        upcoming[: len(following), row] = following
        upcoming[len(following) : num_lookahead, row] = 0


def prepare_pos_seq_lens(
    positions: torch.Tensor,  # [tokens] int64
    seq_lens: torch.Tensor,  # [max_num_requests]
    rows: torch.Tensor,  # [requests]
    query_start_loc: torch.Tensor,  # [requests + 1 or more]
    num_computed: torch.Tensor,  # [request rows]
    max_num_requests: int,
    **launch: Any,
) -> None:
    """Positions of a step's tokens, and the requests' lengths after it, 0 for padding."""
    rows_np = rows.numpy()
    num_requests = len(rows_np)
    starts = query_start_loc.numpy()[: num_requests + 1]
    computed = num_computed.numpy()[rows_np]
    query_lens = np.diff(starts)
    lengths = seq_lens.numpy()
    np.add(computed, query_lens, out=lengths[:num_requests])
    lengths[num_requests:max_num_requests] = 0
    first = int(starts[0])
    last = int(starts[-1])
    if last - first == num_requests and (query_lens == 1).all():
        positions.numpy()[first:last] = computed
    else:
        owners, offsets = spans(query_lens)
        positions.numpy()[first:last] = computed[owners] + offsets


def combine_sampled_and_draft_tokens(
    input_ids: torch.Tensor,  # [tokens]
    rows: torch.Tensor,  # [requests]
    last_sampled: torch.Tensor,  # [request rows] or [request rows, 1]
    query_start_loc: torch.Tensor,  # [requests + 1 or more]
    seq_lens: torch.Tensor,  # [requests or more]
    prefill_lens: torch.Tensor,  # [request rows]
    drafts: torch.Tensor,  # [request rows, K]
    drafts_stride: int,
    cu_num_logits: torch.Tensor,  # [requests + 1]
    logits_indices: torch.Tensor,  # [logits] int64
    NUM_NEW_SAMPLED_TOKENS: int = 1,
    **launch: Any,
) -> None:
    """Put each decoding request's last token and drafts in its input, and find its rows
    of logits.

    A request's logits are those of its last tokens. Tokens of a prompt stay as they
    are.
    """
    ids = input_ids.numpy()
    rows_np = rows.numpy()
    num_requests = len(rows_np)
    ends = query_start_loc.numpy()[1 : num_requests + 1]
    cu_logits = cu_num_logits.numpy()[: num_requests + 1]
    num_logits = np.diff(cu_logits)
    lengths = seq_lens.numpy()[:num_requests]
    prompts = prefill_lens.numpy()[rows_np]
    first_logits = ends - num_logits
    decoding = lengths > prompts
    places = logits_indices.numpy()[cu_logits[0] : cu_logits[-1]]

    if NUM_NEW_SAMPLED_TOKENS:
        generated = decoding & (lengths - num_logits >= prompts)
        if generated.any():
            newest = last_sampled.numpy().reshape(len(last_sampled), -1)[
                rows_np[generated], 0
            ]
            ids[first_logits[generated]] = newest
        if len(places) == num_requests and (num_logits == 1).all():  # no drafts
            places[:] = first_logits
            return

    owners, offsets = spans(num_logits)
    places[:] = first_logits[owners] + offsets
    is_draft = decoding[owners] & (offsets >= NUM_NEW_SAMPLED_TOKENS)
    if is_draft.any():
        draft_rows = rows_np[owners[is_draft]]
        columns = offsets[is_draft] - NUM_NEW_SAMPLED_TOKENS
        ids[places[is_draft]] = drafts.numpy()[draft_rows, columns]


def get_num_sampled_and_rejected(
    num_sampled: torch.Tensor,  # [requests]
    num_rejected: torch.Tensor,  # [requests]
    seq_lens: torch.Tensor,  # [requests or more]
    cu_num_logits: torch.Tensor,  # [requests + 1]
    rows: torch.Tensor,  # [requests]
    prefill_lens: torch.Tensor,  # [request rows]
) -> None:
    """Count rejected drafts. A request whose prompt goes on has sampled and rejected none."""
    rows_np = rows.numpy()
    num_requests = len(rows_np)
    within_prompt = seq_lens.numpy()[:num_requests] < prefill_lens.numpy()[rows_np]
    sampled = num_sampled.numpy()[:num_requests]
    sampled[within_prompt] = 0
    rejected = np.diff(cu_num_logits.numpy()[: num_requests + 1]) - sampled
    rejected[within_prompt] = 0
    num_rejected.numpy()[:num_requests] = rejected


def post_update(
    rows: torch.Tensor,  # [requests], -1: leave out
    num_computed: torch.Tensor,  # [request rows]
    last_sampled: torch.Tensor,  # [request rows] or [request rows, 1]
    output_counts: torch.Tensor | None,  # [request rows, V] int32
    output_counts_stride: int,
    sampled: torch.Tensor,  # [requests, K + 1]
    sampled_stride: int,
    num_sampled: torch.Tensor,  # [requests]
    num_rejected: torch.Tensor,  # [requests]
    query_start_loc: torch.Tensor | None,  # [requests + 1 or more]
    all_token_ids: torch.Tensor,  # [request rows, max_model_len]
    all_token_ids_stride: int,
    total_lens: torch.Tensor,  # [request rows]
    drafts: torch.Tensor
    | None = None,  # [requests, K]; from vLLM 0.33 on, as what follows
    drafts_out: torch.Tensor | None = None,  # [request rows, K]
    num_drafts: int = 0,
    **launch: Any,
) -> None:
    """Append a step's tokens to the requests' texts, and advance their lengths."""
    places = np.arange(len(rows))
    rows_np = rows.numpy()
    if rows_np.min(initial=0) < 0:
        places = np.flatnonzero(rows_np >= 0)
        rows_np = rows_np[places]

    if drafts is not None:
        assert drafts_out is not None
        drafts_out.numpy()[rows_np, :num_drafts] = drafts.numpy()[places, :num_drafts]

    counts = num_sampled.numpy()[places]
    tokens = sampled.numpy()
    if (counts == 1).all():
        emitting_rows = rows_np
        new_tokens = tokens[places, 0]
        newest = new_tokens
        token_rows = rows_np
        columns = total_lens.numpy()[rows_np]
    else:
        emitting = np.flatnonzero(counts > 0)
        emitting_rows = rows_np[emitting]
        emitting_places = places[emitting]
        owners, offsets = spans(counts[emitting])
        new_tokens = tokens[emitting_places[owners], offsets]
        newest = tokens[emitting_places, counts[emitting] - 1]
        token_rows = emitting_rows[owners]
        columns = total_lens.numpy()[token_rows] + offsets
    last_sampled.numpy().reshape(len(last_sampled), -1)[emitting_rows, 0] = newest
    all_token_ids.numpy()[token_rows, columns] = new_tokens
    if output_counts is not None:
        np.add.at(output_counts.numpy(), (token_rows, new_tokens), 1)
    total_lens.numpy()[rows_np] += np.maximum(counts, 0)

    advanced = -num_rejected.numpy()[places]
    if query_start_loc is not None:
        advanced += np.diff(query_start_loc.numpy()[: len(rows) + 1])[places]
    num_computed.numpy()[rows_np] += advanced


def post_update_num_computed_tokens(
    rows: torch.Tensor,  # [requests]
    num_computed: torch.Tensor,  # [request rows]
    query_start_loc: torch.Tensor,  # [requests + 1 or more]
) -> None:
    """Advance the requests by a step's tokens, as a pipeline stage does that samples none."""
    rows_np = rows.numpy()
    num_computed.numpy()[rows_np] += np.diff(
        query_start_loc.numpy()[: len(rows_np) + 1]
    )


def expand_idx_mapping(
    rows: torch.Tensor,  # [requests]
    expanded_rows: torch.Tensor,  # [logits]
    local_positions: torch.Tensor,  # [logits] int32
    cu_num_logits: torch.Tensor,  # [requests + 1]
    **launch: Any,
) -> None:
    """The request row of each row of logits, and its index among that request's."""
    rows_np = rows.numpy()
    owners, offsets = spans(np.diff(cu_num_logits.numpy()[: len(rows_np) + 1]))
    expanded_rows.numpy()[: len(owners)] = rows_np[owners]
    local_positions.numpy()[: len(owners)] = offsets

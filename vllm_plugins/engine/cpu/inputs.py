# SPDX-License-Identifier: Apache-2.0
"""Kernels of input_batch.py, mm/rope.py and spec_decode/rejection_sampler.py: a step's
inputs, and what the requests' tables keep of its tokens.
"""

from typing import Any

import numpy as np
from numpy import ndarray

from vllm_ppd.vllm_plugins.engine.cpu.tables import (
    counted_from,
    lengths_between,
    spans,
)


def prepare_prefill_inputs(
    input_ids: ndarray,  # [tokens]
    next_prefill_tokens: ndarray,  # [num_lookahead, request rows]
    num_lookahead: int,
    idx_mapping: ndarray,  # [requests] request rows
    query_start_loc: ndarray,  # [requests + 1 or more]
    all_token_ids: ndarray,  # [request rows, max_model_len]
    prefill_lens: ndarray,  # [request rows]
    num_computed_tokens: ndarray,  # [request rows]
) -> None:
    """Copy the tokens of requests within their prompt, and those that follow, 0 after its end."""
    computed = num_computed_tokens[idx_mapping]
    lengths = prefill_lens[idx_mapping]
    for request in np.flatnonzero(computed < lengths):
        row = idx_mapping[request]
        start, end = query_start_loc[request : request + 2]
        begin = computed[request]
        next_begin = begin + end - start
        input_ids[start:end] = all_token_ids[row, begin:next_begin]
        next_end = min(next_begin + num_lookahead, lengths[request])
        following = all_token_ids[row, next_begin:next_end]
        next_prefill_tokens[:, row] = 0
        next_prefill_tokens[: len(following), row] = following


def prepare_pos_seq_lens(
    pos: ndarray,  # [tokens] int64
    seq_lens: ndarray,  # [max_num_reqs]
    idx_mapping: ndarray,  # [requests] request rows
    query_start_loc: ndarray,  # [requests + 1 or more]
    num_computed_tokens: ndarray,  # [request rows]
    max_num_reqs: int,
) -> None:
    """Positions of a step's tokens, and the requests' lengths after it, 0 for padding."""
    num_requests = len(idx_mapping)
    computed = num_computed_tokens[idx_mapping]
    query_lens = lengths_between(query_start_loc, idx_mapping)
    seq_lens[:num_requests] = computed + query_lens
    seq_lens[num_requests:max_num_reqs] = 0
    numbers = counted_from(computed, query_start_loc, query_lens)
    pos[: len(numbers)] = numbers


def combine_sampled_and_draft_tokens(
    input_ids: ndarray,  # [tokens]
    idx_mapping: ndarray,  # [requests] request rows
    last_sampled_tokens: ndarray,  # [request rows] or [request rows, 1]
    query_start_loc: ndarray,  # [requests + 1 or more]
    seq_lens: ndarray,  # [requests or more]
    prefill_len: ndarray,  # [request rows]
    draft_tokens: ndarray,  # [request rows, K]
    cu_num_logits: ndarray,  # [requests + 1]
    logits_indices: ndarray,  # [logits] int64
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Put each decoding request's last token and drafts in its input, and find its rows
    of logits.

    A request's logits are those of its last tokens. Tokens of a prompt stay as they
    are.
    """
    num_requests = len(idx_mapping)
    num_logits = lengths_between(cu_num_logits, idx_mapping)
    lengths = seq_lens[:num_requests]
    prompts = prefill_len[idx_mapping]
    first_tokens = query_start_loc[1 : num_requests + 1] - num_logits
    tokens = counted_from(first_tokens, cu_num_logits, num_logits)
    logits_indices[: len(tokens)] = tokens
    if NUM_NEW_SAMPLED_TOKENS:
        generated = lengths - num_logits >= prompts
        newest = last_sampled_tokens.reshape(-1)[idx_mapping[generated]]
        input_ids[first_tokens[generated]] = newest
    if len(tokens) == num_requests * NUM_NEW_SAMPLED_TOKENS:
        return  # no drafts
    decoding = lengths > prompts
    requests, offsets = spans(num_logits)
    is_draft = decoding[requests] & (offsets >= NUM_NEW_SAMPLED_TOKENS)
    rows = idx_mapping[requests[is_draft]]
    columns = offsets[is_draft] - NUM_NEW_SAMPLED_TOKENS
    input_ids[tokens[is_draft]] = draft_tokens[rows, columns]


def get_num_sampled_and_rejected(
    num_sampled: ndarray,  # [requests]
    num_rejected: ndarray,  # [requests]
    seq_lens: ndarray,  # [requests or more]
    cu_num_logits: ndarray,  # [requests + 1]
    idx_mapping: ndarray,  # [requests] request rows
    prefill_len: ndarray,  # [request rows]
) -> None:
    """Count rejected drafts. A request whose prompt goes on has sampled and rejected none."""
    num_requests = len(idx_mapping)
    within_prompt = seq_lens[:num_requests] < prefill_len[idx_mapping]
    sampled = num_sampled[:num_requests]
    sampled[within_prompt] = 0
    rejected = lengths_between(cu_num_logits, idx_mapping) - sampled
    rejected[within_prompt] = 0
    num_rejected[:num_requests] = rejected


def post_update(
    idx_mapping: ndarray,  # [requests] request rows, -1: leave out
    num_computed_tokens: ndarray,  # [request rows]
    last_sampled_tokens: ndarray,  # [request rows] or [request rows, 1]
    output_bin_counts: ndarray | None,  # [request rows, V] int32
    sampled_tokens: ndarray,  # [requests, K + 1]
    num_sampled: ndarray,  # [requests]
    num_rejected: ndarray,  # [requests]
    query_start_loc: ndarray | None,  # [requests + 1 or more]
    all_token_ids: ndarray,  # [request rows, max_model_len]
    total_len: ndarray,  # [request rows]
    # From vLLM 0.33 on:
    draft_tokens: Any = None,  # [requests, K], or None
    draft_tokens_out: Any = None,  # [request rows, K]
    num_draft_tokens: int = 0,
) -> None:
    """Append a step's tokens to the requests' texts, and advance their lengths."""
    rows = idx_mapping
    computed = -num_rejected
    if query_start_loc is not None:
        computed += lengths_between(query_start_loc, rows)
    if rows.min(initial=0) < 0:
        not_left_out = np.flatnonzero(rows >= 0)
        rows = rows[not_left_out]
        computed = computed[not_left_out]
        sampled_tokens = sampled_tokens[not_left_out]
        num_sampled = num_sampled[not_left_out]
        if draft_tokens is not None:
            draft_tokens = draft_tokens[not_left_out]
    if draft_tokens is not None:
        drafts = draft_tokens[:, :num_draft_tokens]
        draft_tokens_out[rows, :num_draft_tokens] = drafts

    places = np.arange(sampled_tokens.shape[1])
    requests, offsets = np.nonzero(places < num_sampled[:, None])
    token_rows = rows[requests]
    tokens = sampled_tokens[requests, offsets]
    lengths = total_len[rows]
    # Of a request's several tokens the last assignment stays.
    last_sampled_tokens.reshape(-1)[token_rows] = tokens
    all_token_ids[token_rows, lengths[requests] + offsets] = tokens
    if output_bin_counts is not None:
        np.add.at(output_bin_counts, (token_rows, tokens), 1)
    total_len[rows] = lengths + np.maximum(num_sampled, 0)
    num_computed_tokens[rows] += computed


def post_update_num_computed_tokens(
    idx_mapping: ndarray,  # [requests] request rows
    num_computed_tokens: ndarray,  # [request rows]
    query_start_loc: ndarray,  # [requests + 1 or more]
) -> None:
    """Advance the requests by a step's tokens, as a pipeline stage does that samples none."""
    query_lens = lengths_between(query_start_loc, idx_mapping)
    num_computed_tokens[idx_mapping] += query_lens


def expand_idx_mapping(
    idx_mapping: ndarray,  # [requests] request rows
    expanded_idx_mapping: ndarray,  # [logits]
    expanded_local_pos: ndarray,  # [logits] int32
    cu_num_logits: ndarray,  # [requests + 1]
) -> None:
    """The request row of each row of logits, and its index among that request's."""
    requests, offsets = spans(lengths_between(cu_num_logits, idx_mapping))
    expanded_idx_mapping[: len(requests)] = idx_mapping[requests]
    expanded_local_pos[: len(requests)] = offsets


def prepare_rope_positions(
    positions: ndarray,  # [NUM_DIMS, tokens or more] int64
    prefill_positions: ndarray,  # [request rows x NUM_DIMS, max_model_len]
    prefill_delta: ndarray,  # [request rows] from a text's length to the next position
    idx_mapping: ndarray,  # [requests] request rows
    query_start_loc: ndarray,  # [requests + 1 or more]
    prefill_lens: ndarray,  # [request rows]
    num_computed_tokens: ndarray,  # [request rows]
    NUM_DIMS: int,
) -> None:
    """M-RoPE's positions of a step's tokens: a prompt's are given. After it all
    dimensions go on alike.
    """
    computed = num_computed_tokens[idx_mapping]
    query_lens = lengths_between(query_start_loc, idx_mapping)
    firsts = computed + prefill_delta[idx_mapping]
    generated = counted_from(firsts, query_start_loc, query_lens)
    positions[:NUM_DIMS, : len(generated)] = generated
    for request in np.flatnonzero(computed < prefill_lens[idx_mapping]):
        start = query_start_loc[request]
        first_row = idx_mapping[request] * NUM_DIMS
        begin = computed[request]
        end = begin + query_lens[request]
        prompt = prefill_positions[first_row : first_row + NUM_DIMS, begin:end]
        positions[:NUM_DIMS, start : start + prompt.shape[1]] = prompt


def flatten_sampled(
    flat_sampled: ndarray,  # [logits]
    sampled: ndarray,  # [requests, K + 1]
    num_sampled: ndarray,  # [requests]
    cu_num_logits: ndarray,  # [requests + 1]
) -> None:
    """Put each request's tokens where its rows of logits are."""
    requests, offsets = spans(num_sampled)
    flat_sampled[cu_num_logits[requests] + offsets] = sampled[requests, offsets]


def gather_draft_sampled(
    draft_sampled: ndarray,  # [logits]
    pos: ndarray,  # [logits]
    input_ids: ndarray,  # [tokens]
    positions: ndarray,  # [tokens]
    logits_indices: ndarray,  # [logits]
    expanded_idx_mapping: ndarray,  # [logits] request rows
    expanded_local_pos: ndarray,  # [logits] index among the request's rows of logits
    prefill_len: ndarray,  # [request rows]
    num_logits: int,
) -> None:
    """The input token and the position of each row of logits; -1 for a draft within the prompt."""
    token_positions = positions[logits_indices]
    prompts = prefill_len[expanded_idx_mapping]
    in_prompt = token_positions - expanded_local_pos < prompts
    unusable = (expanded_local_pos > 0) & in_prompt
    tokens = input_ids[logits_indices]
    draft_sampled[:num_logits] = np.where(unusable, -1, tokens)
    pos[:num_logits] = token_positions

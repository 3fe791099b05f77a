# SPDX-License-Identifier: Apache-2.0
"""Kernels of structured_outputs.py, metrics/logits.py and of sample: min_p.py,
trace_replay.py, output.py, logprob.py and prompt_logprob.py.
"""

import numpy as np
import torch
from numpy import ndarray

from vllm_ppd.vllm_plugins.engine.cpu.kernels.arrays import (
    lengths_between,
    spans,
    unpacked,
)


def apply_min_p(
    logits: ndarray,  # [logits, V] float32, changed in place
    expanded_idx_mapping: ndarray,  # [logits] request rows
    min_p: ndarray,  # [request rows]
) -> None:
    """Drop tokens less likely than a share of the likeliest's probability."""
    shares = min_p[expanded_idx_mapping]
    for row in np.flatnonzero(shares):
        values = logits[row]
        values[values < values.max() + np.log(shares[row])] = -np.inf


def replay_trace(
    sampled: ndarray,  # [requests] int64, changed in place
    idx_mapping: ndarray,  # [requests] request rows, -1: padding
    trace_token_ids: ndarray,  # [request rows, max_model_len]
    trace_len: ndarray,  # [request rows]
    total_len: ndarray,  # [request rows]
    prompt_len: ndarray,  # [request rows]
) -> None:
    """Put the tokens of requests' traces in place of the sampled ones."""
    steps = total_len[idx_mapping] - prompt_len[idx_mapping]
    traced = (idx_mapping >= 0) & (steps >= 0) & (steps < trace_len[idx_mapping])
    sampled[traced] = trace_token_ids[idx_mapping[traced], steps[traced]]


def compact_sampling_mask(
    logits: torch.Tensor,  # [logits, V]
    cu_num_logits: ndarray,  # [requests + 1]
    num_sampled_tokens: ndarray,  # [requests]
    token_ids: ndarray,  # [requests x ROWS_PER_REQUEST, max_num_kept] int32
    packed_mask: ndarray,  # [requests x ROWS_PER_REQUEST, V / 8] uint8
    counts: ndarray,  # [requests x ROWS_PER_REQUEST] int32
    max_num_kept: int,
    ROWS_PER_REQUEST: int,
) -> None:
    """The tokens that each sampled token was drawn from: first IDs, their number, and a
    bit each.
    """
    counts[:] = 0
    requests, slots = spans(num_sampled_tokens)
    for request, slot in zip(requests, slots, strict=True):
        output_row = request * ROWS_PER_REQUEST + slot
        kept = logits[cu_num_logits[request] + slot].isfinite().numpy()
        kept_ids = np.flatnonzero(kept)
        counts[output_row] = len(kept_ids)
        first_ids = kept_ids[:max_num_kept]
        token_ids[output_row, : len(first_ids)] = first_ids
        packed_mask[output_row] = np.packbits(kept, bitorder="little")


def count_nans(
    logits: torch.Tensor,  # [logits, V]
    num_nans: torch.Tensor,  # [logits] int32
) -> None:
    """Count the NaNs of each row."""
    num_nans.copy_(logits.isnan().sum(dim=-1))


def topk_log_softmax(
    output: torch.Tensor,  # [logits, k] float32
    logits: torch.Tensor,  # [logits, V]
    topk_ids: torch.Tensor,  # [logits, k] int64
) -> None:
    """Log-probabilities of the given tokens."""
    values = logits.float()
    shifted = values - values.amax(dim=-1, keepdim=True)
    log_sums = shifted.exp().sum(dim=-1, keepdim=True).log_()
    torch.sub(shifted.gather(-1, topk_ids), log_sums, out=output)


def compute_ranks(
    output: torch.Tensor,  # [logits] int64
    logits: torch.Tensor,  # [logits, V]
    token_ids: torch.Tensor,  # [logits]
) -> None:
    """How many tokens are at least as likely as the given one, which counts itself."""
    chosen = logits.gather(1, token_ids[:, None].long())
    torch.sum(logits >= chosen, dim=1, out=output)


def fill_logprob_token_ids(
    out_token_ids: ndarray,  # [logits, 1 + columns] int64, zero
    out_valid_mask: ndarray,  # [logits, 1 + columns] bool, false
    sampled_token_ids: ndarray,  # [logits]
    topk_indices: ndarray,  # [logits, NUM_TOPK]; not read if NUM_TOPK is 0
    expanded_idx_mapping: ndarray,  # [logits or more] request rows
    num_per_req_token_ids: ndarray,  # [request rows]
    per_req_token_ids: ndarray,  # [request rows, most of them]
    NUM_TOPK: int,
) -> None:
    """List the tokens of log-probabilities: the sampled one, then those the request
    names or the best.
    """
    out_token_ids[:, 0] = sampled_token_ids
    out_valid_mask[:, 0] = True
    for place in range(len(out_token_ids)):
        row = expanded_idx_mapping[place]
        number = num_per_req_token_ids[row]
        if number:
            listed = per_req_token_ids[row, :number]
        elif NUM_TOPK:
            listed = topk_indices[place, :NUM_TOPK]
        else:
            continue
        out_token_ids[place, 1 : 1 + len(listed)] = listed
        out_valid_mask[place, 1 : 1 + len(listed)] = True


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids: ndarray,  # [tokens] int64
    query_start_loc: ndarray,  # [requests + 1 or more]
    idx_mapping: ndarray,  # [requests] request rows
    num_computed_tokens: ndarray,  # [request rows]
    all_token_ids: ndarray,  # [request rows, max_model_len]
) -> None:
    """The token that follows each token of a step."""
    query_lens = lengths_between(query_start_loc, idx_mapping)
    requests, offsets = spans(query_lens)
    rows = idx_mapping[requests]
    columns = num_computed_tokens[rows] + 1 + offsets
    # Nothing follows the last token of a full row; vLLM reads on there, and drops what
    # it finds.
    columns = np.minimum(columns, all_token_ids.shape[1] - 1)
    prompt_logprobs_token_ids[: len(rows)] = all_token_ids[rows, columns]


def apply_grammar_bitmask(
    logits: torch.Tensor,  # [logits, V], changed in place
    # [masks] request x MASK_STRIDE + index among its rows of logits
    logits_indices: ndarray,
    cu_num_logits: ndarray,  # [requests + 1]
    bitmask: ndarray,  # [masks, V / 32] int32, a bit a token that the grammar allows
    vocab_size: int,
    MASK_STRIDE: int,
) -> None:
    """Drop the tokens that a grammar does not allow.

    A mask for a row that the step does not have is left out.
    """
    for mask, place in zip(bitmask, logits_indices, strict=False):
        request, local = divmod(place, MASK_STRIDE)
        row = cu_num_logits[request] + local
        if row < cu_num_logits[request + 1]:
            forbidden = torch.from_numpy(~unpacked(mask, vocab_size))
            logits[row, :vocab_size].masked_fill_(forbidden, float("-inf"))

# SPDX-License-Identifier: Apache-2.0
"""Kernels of spec_decode/rejection_sampler.py and spec_decode/ngram/speculator.py."""

import numpy as np
from numpy import ndarray

from vllm_ppd.vllm_plugins.engine.cpu.kernels.arrays import spans


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


def ngram_scan(
    token_ids: ndarray,  # [request rows, max_model_len]
    idx_mapping: ndarray,  # [requests] request rows
    total_len: ndarray,  # [request rows]
    num_sampled: ndarray,  # [requests]
    scratch: ndarray,  # [requests or more, blocks] int64
    L: int,  # max_model_len
    MIN_N: int,
    MAX_N: int,
) -> None:
    """Find the longest earlier occurrence of the last MIN_N to MAX_N tokens, the latest
    of several.

    Its score is length x (L + 1) + begin + 1, or 0 if there is none. The greatest score
    of a request's blocks counts: this one is written as the first block's, 0 as the
    others'.
    """
    scratch[: len(idx_mapping)] = 0
    for place, row in enumerate(idx_mapping):
        text = token_ids[row, : total_len[row]]
        if num_sampled[place] > 0 and len(text) >= MIN_N:
            length, begin = longest_match(text, MAX_N)
            if length >= MIN_N:
                scratch[place, 0] = length * (L + 1) + begin + 1


def longest_match(text: ndarray, max_length: int) -> tuple[int, int]:
    """(length, begin) of the longest, then latest earlier occurrence of a text's end;
    length 0: none.
    """
    last = len(text) - 1
    ends = np.flatnonzero(text[:last] == text[last])
    length = 0
    end = 0
    while len(ends):
        length += 1
        end = int(ends[-1])
        if length == max_length:
            break
        ends = ends[ends >= length]
        ends = ends[text[ends - length] == text[last - length]]
    return length, end - length + 1


def ngram_finalize(
    token_ids: ndarray,  # [request rows, max_model_len]
    idx_mapping: ndarray,  # [requests] request rows
    total_len: ndarray,  # [request rows]
    num_sampled: ndarray,  # [requests]
    last_sampled: ndarray,  # [request rows]
    scratch: ndarray,  # [requests or more, blocks] int64
    drafts: ndarray,  # [requests or more, K] int64
    L: int,  # max_model_len
    K: int,
) -> None:
    """Draft the tokens that followed the match, and the last token where there are none."""
    for place, row in enumerate(idx_mapping):
        drafts[place, :K] = last_sampled[row]
        score = scratch[place].max()
        if num_sampled[place] > 0 and score > 0:
            length, begin = divmod(score - 1, L + 1)
            start = begin + length
            followers = token_ids[row, start : min(start + K, total_len[row])]
            drafts[place, : len(followers)] = followers

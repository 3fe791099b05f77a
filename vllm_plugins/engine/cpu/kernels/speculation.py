# SPDX-License-Identifier: Apache-2.0
"""Kernels of spec_decode/rejection_sampler.py and spec_decode/ngram/speculator.py."""

from typing import Any

import numpy as np
import torch


def flatten_sampled(
    flat: torch.Tensor,  # [logits]
    sampled: torch.Tensor,  # [requests, K + 1]
    sampled_stride: int,
    num_sampled: torch.Tensor,  # [requests]
    cu_num_logits: torch.Tensor,  # [requests + 1]
    **launch: Any,
) -> None:
    """Put each request's tokens where its rows of logits are."""
    flat_np = flat.numpy()
    tokens = sampled.numpy()
    starts = cu_num_logits.tolist()
    for request, number in enumerate(num_sampled.tolist()):
        flat_np[starts[request] : starts[request] + number] = tokens[request, :number]


def gather_draft_sampled(
    draft_sampled: torch.Tensor,  # [logits]
    output_positions: torch.Tensor,  # [logits]
    input_ids: torch.Tensor,  # [tokens]
    positions: torch.Tensor,  # [tokens]
    logits_indices: torch.Tensor,  # [logits]
    rows: torch.Tensor,  # [logits]
    local_positions: torch.Tensor,  # [logits] index among the request's rows of logits
    prefill_lens: torch.Tensor,  # [request rows]
    num_logits: int,
    **launch: Any,
) -> None:
    """The input token and the position of each row of logits; -1 for a draft within the prompt."""
    places = logits_indices.numpy()
    locals_np = local_positions.numpy()
    token_positions = positions.numpy()[places]
    draft_sampled_np = draft_sampled.numpy()
    draft_sampled_np[:num_logits] = input_ids.numpy()[places]
    output_positions.numpy()[:num_logits] = token_positions
    is_draft = locals_np > 0
    if is_draft.any():
        in_prompt = token_positions - locals_np < prefill_lens.numpy()[rows.numpy()]
        draft_sampled_np[:num_logits][is_draft & in_prompt] = -1


def ngram_scan(
    all_token_ids: torch.Tensor,  # [request rows, max_model_len]
    all_token_ids_stride: int,
    rows: torch.Tensor,  # [requests]
    total_lens: torch.Tensor,  # [request rows]
    num_sampled: torch.Tensor,  # [requests]
    scores: torch.Tensor,  # [requests or more, blocks] int64
    scores_stride: int,
    max_model_len: int,
    MIN_N: int,
    MAX_N: int,
    *launch: int,
    **more_launch: Any,
) -> None:
    """Find the longest earlier occurrence of the last MIN_N to MAX_N tokens, the latest
    of several.

    Its score is length x (max_model_len + 1) + begin + 1, or 0 if there is none. The
    greatest score of a request's blocks counts: this one is written as the first
    block's, 0 as the others'.
    """
    tokens = all_token_ids.numpy()
    scores_np = scores.numpy()
    for place, (row, number) in enumerate(
        zip(rows.tolist(), num_sampled.tolist(), strict=False)
    ):
        scores_np[place] = 0
        text = tokens[row, : int(total_lens[row])]
        if number > 0 and len(text) >= MIN_N:
            length, begin = longest_match(text, MAX_N)
            if length >= MIN_N:
                scores_np[place, 0] = length * (max_model_len + 1) + begin + 1


def longest_match(text: np.ndarray, max_length: int) -> tuple[int, int]:
    """(length, begin) of the longest, then latest earlier occurrence of a text's end;
    length 0: none.
    """
    last = len(text) - 1
    ends = np.flatnonzero(text[:last] == text[last])
    length = 0
    longest = ends
    while len(ends):
        length += 1
        longest = ends
        if length == max_length:
            break
        ends = ends[ends >= length]
        ends = ends[text[ends - length] == text[last - length]]
    return (length, int(longest[-1]) - length + 1) if length else (0, 0)


def ngram_finalize(
    all_token_ids: torch.Tensor,  # [request rows, max_model_len]
    all_token_ids_stride: int,
    rows: torch.Tensor,  # [requests]
    total_lens: torch.Tensor,  # [request rows]
    num_sampled: torch.Tensor,  # [requests]
    last_sampled: torch.Tensor,  # [request rows] or [request rows, 1]
    scores: torch.Tensor,  # [requests or more, blocks] int64
    scores_stride: int,
    drafts: torch.Tensor,  # [requests or more, K] int64
    max_model_len: int,
    num_blocks: int,
    K: int,
    *launch: int,
    **more_launch: Any,
) -> None:
    """Draft the tokens that followed the match, and the last token where there are none."""
    tokens = all_token_ids.numpy()
    newest = last_sampled.numpy().reshape(-1)
    output = drafts.numpy()
    best = scores.numpy()[: len(rows), :num_blocks].max(axis=1).tolist()
    requests = zip(rows.tolist(), num_sampled.tolist(), best, strict=False)
    for place, (row, number, score) in enumerate(requests):
        output[place, :K] = newest[row]
        if number > 0 and score > 0:
            length, begin = divmod(score - 1, max_model_len + 1)
            start = begin + length
            followers = tokens[row, start : min(start + K, int(total_lens[row]))]
            output[place, : len(followers)] = followers

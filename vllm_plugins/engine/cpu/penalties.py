# SPDX-License-Identifier: Apache-2.0
"""Kernels of sample/penalties.py, sample/logit_bias.py, sample/bad_words.py and
sample/thinking_budget.py.
"""

from itertools import pairwise

import numpy as np
from numpy import ndarray
from numpy.lib.stride_tricks import sliding_window_view

from vllm_ppd.vllm_plugins.engine.cpu.tables import unpacked

FORCED = 1.0e9  # logit


def apply_penalties(
    logits: ndarray,  # [logits, V] float32, changed in place
    expanded_idx_mapping: ndarray,  # [logits] request rows
    token_ids: ndarray,  # [logits] the input token of each row of logits
    expanded_local_pos: ndarray,  # [logits] index among the request's rows of logits
    repetition_penalty: ndarray,  # [request rows]
    frequency_penalty: ndarray,  # [request rows]
    presence_penalty: ndarray,  # [request rows]
    prompt_bin_mask: ndarray,  # [request rows, V / 32] int32, a bit a token
    output_bin_counts: ndarray,  # [request rows, V]
    vocab_size: int,
) -> None:
    """Penalize tokens of the prompt and the output, with the drafts before a row's position."""
    one = np.float32(1.0)
    for place, row in enumerate(expanded_idx_mapping):
        repetition = repetition_penalty[row]
        frequency = frequency_penalty[row]
        presence = presence_penalty[row]
        if repetition == 1.0 and frequency == 0.0 and presence == 0.0:
            continue
        values = logits[place]
        drafts = token_ids[place - expanded_local_pos[place] + 1 : place + 1]
        seen = output_bin_counts[row, :vocab_size].copy()
        np.add.at(seen, drafts, 1)
        emitted = np.flatnonzero(seen > 0)
        if repetition != 1.0:
            repeated = unpacked(prompt_bin_mask[row], vocab_size)
            repeated[emitted] = True
            before = values[repeated]
            factors = np.where(before > 0, one / repetition, repetition)
            values[repeated] = before * factors
        values[emitted] -= frequency * seen[emitted].astype(np.float32)
        values[emitted] -= presence


def count_tokens(
    expanded_idx_mapping: ndarray,  # [new requests] request rows
    all_token_ids: ndarray,  # [request rows, max_model_len]
    prompt_len: ndarray,  # [request rows]
    prefill_len: ndarray,  # [request rows] more than the prompt's after a preemption
    prompt_bin_mask: ndarray,  # [request rows, V / 32] int32, zero in these rows
    output_bin_counts: ndarray,  # [request rows, V], zero in these rows
) -> None:
    """Note which tokens are in new requests' prompts, and count those of their outputs."""
    masks = prompt_bin_mask.view(np.uint32)
    for row in expanded_idx_mapping:
        prompt = all_token_ids[row, : prompt_len[row]]
        # Placeholders of images and sounds may lie outside the vocabulary
        prompt = prompt[prompt < output_bin_counts.shape[1]]
        output = all_token_ids[row, prompt_len[row] : prefill_len[row]]
        bits = np.left_shift(np.uint32(1), prompt.astype(np.uint32) % 32)
        np.bitwise_or.at(masks[row], prompt // 32, bits)
        np.add.at(output_bin_counts[row], output, 1)


def apply_logit_bias(
    logits: ndarray,  # [logits, V] float32, changed in place
    expanded_idx_mapping: ndarray,  # [logits] request rows
    num_allowed_token_ids: ndarray,  # [request rows]
    allowed_token_ids: ndarray,  # [request rows, most of them]
    num_logit_bias: ndarray,  # [request rows]
    bias_token_ids: ndarray,  # [request rows, most of them]
    bias: ndarray,  # [request rows, most of them] float32
    pos: ndarray,  # [logits]
    min_lens: ndarray,  # [request rows]
    num_stop_token_ids: ndarray,  # [request rows]
    restore_when_all_masked: ndarray,  # [request rows]
    stop_token_ids: ndarray,  # [request rows, most of them]
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Keep allowed tokens alone, add biases, and drop tokens that would end a text too
    early.

    With structured output, tokens that end the text stay if nothing else is left.
    """
    for place, row in enumerate(expanded_idx_mapping):
        values = logits[place]
        number = num_allowed_token_ids[row]
        if number:
            allowed = allowed_token_ids[row, :number]
            kept = values[allowed]
            values[:] = -np.inf
            values[allowed] = kept
        number = num_logit_bias[row]
        values[bias_token_ids[row, :number]] += bias[row, :number]
        number = num_stop_token_ids[row]
        if number and pos[place] + 1 < min_lens[row]:
            stops = stop_token_ids[row, :number]
            before = values[stops]
            values[stops] = -np.inf
            restore = CHECK_ALL_MASKED_ROWS and restore_when_all_masked[row]
            if restore and values.max() == -np.inf:
                finite = np.isfinite(before)
                values[stops[finite]] = before[finite]


def apply_bad_words(
    logits: ndarray,  # [logits, V], changed in place
    expanded_idx_mapping: ndarray,  # [logits] request rows
    bad_word_token_ids: ndarray,  # [request rows, tokens of all words]
    bad_word_offsets: ndarray,  # [request rows, words + 1]
    num_bad_words: ndarray,  # [request rows]
    all_token_ids: ndarray,  # [request rows, max_model_len]
    prompt_len: ndarray,  # [request rows]
    total_len: ndarray,  # [request rows]
    input_ids: ndarray,  # [logits] the input token of each row of logits
    expanded_local_pos: ndarray,  # [logits] index among the request's rows of logits
) -> None:
    """Drop a bad word's last token where the output, with the drafts before, ends with
    its others.
    """
    for place, row in enumerate(expanded_idx_mapping):
        number = num_bad_words[row]
        if not number:
            continue
        output = all_token_ids[row, prompt_len[row] : total_len[row]]
        drafts = input_ids[place - expanded_local_pos[place] + 1 : place + 1]
        text = np.concatenate((output, drafts))
        for start, end in pairwise(bad_word_offsets[row, : number + 1]):
            *beginning, last = bad_word_token_ids[row, start:end].tolist()
            if text[max(len(text) - len(beginning), 0) :].tolist() == beginning:
                logits[place, last] = -np.inf


def update_committed_markers() -> None:
    """Note nothing: apply_thinking_budget searches the whole text for the markers."""


def apply_thinking_budget(
    logits: ndarray,  # [logits, V] float32, changed in place
    expanded_idx_mapping: ndarray,  # [logits] request rows
    thinking_token_budget: ndarray,  # [request rows], below 0: none
    all_token_ids: ndarray,  # [request rows, max_model_len]
    total_len: ndarray,  # [request rows]
    input_ids: ndarray,  # [logits] the input token of each row of logits
    expanded_local_pos: ndarray,  # [logits] index among the request's rows of logits
    reasoning_start_token_ids: ndarray,  # [tokens of the marker]
    natural_reasoning_end_token_ids: ndarray,  # [tokens of the marker]
    reasoning_end_token_ids: ndarray,  # [tokens of the marker that is forced]
) -> None:
    """Force the end marker's next token where a text, with the drafts before, has used
    its budget.
    """
    forced_end = reasoning_end_token_ids.tolist()
    for place, row in enumerate(expanded_idx_mapping):
        budget = thinking_token_budget[row]
        if budget < 0:
            continue
        committed = all_token_ids[row, : total_len[row]]
        drafts = input_ids[place - expanded_local_pos[place] + 1 : place + 1]
        text = np.concatenate((committed, drafts))
        start = latest_place(text, reasoning_start_token_ids)
        if start <= latest_place(text, natural_reasoning_end_token_ids):
            continue
        if len(text) - (start + len(reasoning_start_token_ids)) < budget:
            continue
        # The text may end with the marker's first tokens, all but its last at most.
        tail = text[-len(forced_end) :].tolist()
        begun = max(
            n
            for n in range(len(forced_end))
            if tail[len(tail) - n :] == forced_end[:n]
        )
        logits[place, forced_end[begun]] = FORCED


def latest_place(text: ndarray, marker: ndarray) -> int:
    """Where a marker begins for the last time in a text; -1: nowhere."""
    if len(text) < len(marker):
        return -1
    windows = sliding_window_view(text, len(marker))
    places = np.flatnonzero((windows == marker).all(axis=1))
    return int(places.max(initial=-1))

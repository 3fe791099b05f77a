# SPDX-License-Identifier: Apache-2.0
"""Kernels of sample/penalties.py, sample/logit_bias.py and sample/bad_words.py."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from vllm_ppd.vllm_plugins.engine.cpu.kernels.arrays import unpacked


def apply_penalties(
    logits: torch.Tensor,  # [logits, V] float32, changed in place
    logits_stride: int,
    rows: torch.Tensor,  # [logits]
    token_ids: torch.Tensor,  # [logits] the input token of each row of logits
    local_positions: torch.Tensor,  # [logits] index among the request's rows of logits
    repetition_penalties: torch.Tensor,  # [request rows]
    frequency_penalties: torch.Tensor,  # [request rows]
    presence_penalties: torch.Tensor,  # [request rows]
    prompt_mask: torch.Tensor,  # [request rows, V / 32] int32, a bit a token
    prompt_mask_stride: int,
    output_counts: torch.Tensor,  # [request rows, V]
    output_counts_stride: int,
    vocab_size: int,
    **launch: Any,
) -> None:
    """Penalize tokens of the prompt and the output, with the drafts before a row's position."""
    logits_np = logits.numpy()
    inputs = token_ids.numpy()
    counts = output_counts.numpy()
    one = np.float32(1.0)
    for place, (row, local) in enumerate(
        zip(rows.tolist(), local_positions.tolist(), strict=True)
    ):
        repetition = repetition_penalties.numpy()[row]
        frequency = frequency_penalties.numpy()[row]
        presence = presence_penalties.numpy()[row]
        if repetition == 1.0 and frequency == 0.0 and presence == 0.0:
            continue
        values = logits_np[place]
        seen = counts[row, :vocab_size]
        if local:
            seen = seen.copy()
            np.add.at(seen, inputs[place - local + 1 : place + 1], 1)
        emitted = np.flatnonzero(seen > 0)
        if repetition != 1.0:
            repeated = unpacked(prompt_mask[row], vocab_size)
            repeated[emitted] = True
            penalized = np.flatnonzero(repeated)
            before = values[penalized]
            values[penalized] = before * np.where(
                before > 0, one / repetition, repetition
            )
        values[emitted] -= frequency * seen[emitted].astype(np.float32)
        values[emitted] -= presence


def count_tokens(
    rows: torch.Tensor,  # [new requests]
    all_token_ids: torch.Tensor,  # [request rows, max_model_len]
    all_token_ids_stride: int,
    prompt_lens: torch.Tensor,  # [request rows]
    # [request rows] more than the prompt's after a preemption
    prefill_lens: torch.Tensor,
    prompt_mask: torch.Tensor,  # [request rows, V / 32] int32, zero in these rows
    prompt_mask_stride: int,
    output_counts: torch.Tensor,  # [request rows, V], zero in these rows
    output_counts_stride: int,
    **launch: Any,
) -> None:
    """Note which tokens are in new requests' prompts, and count those of their outputs."""
    tokens = all_token_ids.numpy()
    masks = prompt_mask.numpy().view(np.uint32)
    counts = output_counts.numpy()
    for row in rows.tolist():
        prompt_len = int(prompt_lens[row])
        prompt = tokens[row, :prompt_len]
        output = tokens[row, prompt_len : int(prefill_lens[row])]
        bits = np.left_shift(np.uint32(1), prompt.astype(np.uint32) % 32)
        np.bitwise_or.at(masks[row], prompt // 32, bits)
        np.add.at(counts[row], output, 1)


def apply_logit_bias(
    logits: torch.Tensor,  # [logits, V] float32, changed in place
    logits_stride: int,
    vocab_size: int,
    rows: torch.Tensor,  # [logits]
    num_allowed: torch.Tensor,  # [request rows]
    allowed_token_ids: torch.Tensor,  # [request rows, most of them]
    allowed_token_ids_stride: int,
    num_biases: torch.Tensor,  # [request rows]
    bias_token_ids: torch.Tensor,  # [request rows, most of them]
    bias_token_ids_stride: int,
    biases: torch.Tensor,  # [request rows, most of them] float32
    biases_stride: int,
    positions: torch.Tensor,  # [logits]
    min_lens: torch.Tensor,  # [request rows]
    num_stop_tokens: torch.Tensor,  # [request rows]
    restore_when_all_masked: torch.Tensor,  # [request rows]
    stop_token_ids: torch.Tensor,  # [request rows, most of them]
    stop_token_ids_stride: int,
    CHECK_ALL_MASKED_ROWS: bool = False,
    **launch: Any,
) -> None:
    """Keep allowed tokens alone, add biases, and drop tokens that would end a text too
    early.

    With structured output, tokens that end the text stay if nothing else is left.
    """
    logits_np = logits.numpy()
    for place, row in enumerate(rows.tolist()):
        values = logits_np[place]
        number = int(num_allowed[row])
        if number:
            allowed = allowed_token_ids.numpy()[row, :number]
            kept = values[allowed]
            values[:] = -np.inf
            values[allowed] = kept
        number = int(num_biases[row])
        if number:
            biased = bias_token_ids.numpy()[row, :number]
            values[biased] += biases.numpy()[row, :number]
        number = int(num_stop_tokens[row])
        if number and int(positions[place]) + 1 < int(min_lens[row]):
            stops = stop_token_ids.numpy()[row, :number]
            before = values[stops]
            values[stops] = -np.inf
            restore = CHECK_ALL_MASKED_ROWS and bool(restore_when_all_masked[row])
            if restore and values.max() == -np.inf:
                finite = np.isfinite(before)
                values[stops[finite]] = before[finite]


def apply_bad_words(
    logits: torch.Tensor,  # [logits, V], changed in place
    logits_stride: int,
    rows: torch.Tensor,  # [logits]
    bad_word_token_ids: torch.Tensor,  # [request rows, tokens of all words]
    bad_word_token_ids_stride: int,
    bad_word_offsets: torch.Tensor,  # [request rows, words + 1]
    bad_word_offsets_stride: int,
    num_bad_words: torch.Tensor,  # [request rows]
    all_token_ids: torch.Tensor,  # [request rows, max_model_len]
    all_token_ids_stride: int,
    prompt_lens: torch.Tensor,  # [request rows]
    total_lens: torch.Tensor,  # [request rows]
    input_ids: torch.Tensor,  # [logits] the input token of each row of logits
    local_positions: torch.Tensor,  # [logits] index among the request's rows of logits
) -> None:
    """Drop a bad word's last token where the output, with the drafts before, ends with
    its others.
    """
    logits_np = logits.numpy()
    tokens = all_token_ids.numpy()
    inputs = input_ids.numpy()
    for place, (row, local) in enumerate(
        zip(rows.tolist(), local_positions.tolist(), strict=True)
    ):
        number = int(num_bad_words[row])
        if not number:
            continue
        output = tokens[row, int(prompt_lens[row]) : int(total_lens[row])]
        drafts = inputs[place - local + 1 : place + 1]
        text = np.concatenate((output, drafts))
        for start, end in pairwise(bad_word_offsets[row, : number + 1].tolist()):
            word = bad_word_token_ids.numpy()[row, start:end]
            beginning = word[:-1]
            tail = text[len(text) - len(beginning) :]
            if len(beginning) <= len(text) and (tail == beginning).all():
                logits_np[place, word[-1]] = -np.inf

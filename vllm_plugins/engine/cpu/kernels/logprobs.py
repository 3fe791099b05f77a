# SPDX-License-Identifier: Apache-2.0
"""Kernels of sample/logprob.py and sample/prompt_logprob.py."""

from typing import Any

import numpy as np
import torch

from vllm_ppd.vllm_plugins.engine.cpu.kernels.arrays import as_float32, spans


def topk_log_softmax(
    output: torch.Tensor,  # [logits, k] float32
    logits: torch.Tensor,  # [logits, V]
    logits_stride: int,
    token_ids: torch.Tensor,  # [logits, k] int64
    token_ids_stride: int,
    topk: int,
    vocab_size: int,
    **launch: Any,
) -> None:
    """Log-probabilities of the given tokens."""
    values = logits.float()
    shifted = values - values.amax(dim=-1, keepdim=True)
    log_sums = shifted.exp().sum(dim=-1, keepdim=True).log_()
    torch.sub(shifted.gather(-1, token_ids), log_sums, out=output)


def compute_ranks(
    output: torch.Tensor,  # [logits] int64
    logits: torch.Tensor,  # [logits, V]
    logits_stride: int,
    token_ids: torch.Tensor,  # [logits]
    vocab_size: int,
    **launch: Any,
) -> None:
    """How many tokens are at least as likely as the given one, which counts itself."""
    values = as_float32(logits)
    chosen = np.take_along_axis(
        values, token_ids.numpy()[:, None].astype(np.int64), axis=1
    )
    output.numpy()[:] = np.count_nonzero(values >= chosen, axis=1)


def fill_logprob_token_ids(
    output: torch.Tensor,  # [logits, 1 + columns] int64, zero
    output_stride: int,
    valid: torch.Tensor,  # [logits, 1 + columns] bool, false
    valid_stride: int,
    sampled: torch.Tensor,  # [logits]
    topk_indices: torch.Tensor,  # [logits, NUM_TOPK]; not read if NUM_TOPK is 0
    topk_indices_stride: int,
    rows: torch.Tensor,  # [logits or more]
    num_token_ids: torch.Tensor,  # [request rows]
    token_ids: torch.Tensor,  # [request rows, most of them]
    token_ids_stride: int,
    NUM_TOPK: int = 0,
    **launch: Any,
) -> None:
    """List the tokens of log-probabilities: the sampled one, then those the request
    names or the best.
    """
    output_np = output.numpy()
    valid_np = valid.numpy()
    output_np[:, 0] = sampled.numpy()
    valid_np[:, 0] = True
    for place, row in enumerate(rows.tolist()[: len(output_np)]):
        number = int(num_token_ids[row])
        if number:
            source = token_ids.numpy()[row]
        else:
            number = NUM_TOPK
            source = topk_indices.numpy()[place] if NUM_TOPK else None
        if number and source is not None:
            output_np[place, 1 : 1 + number] = source[:number]
            valid_np[place, 1 : 1 + number] = True


def prompt_logprobs_token_ids(
    output: torch.Tensor,  # [tokens] int64
    query_start_loc: torch.Tensor,  # [requests + 1 or more]
    rows: torch.Tensor,  # [requests]
    num_computed: torch.Tensor,  # [request rows]
    all_token_ids: torch.Tensor,  # [request rows, max_model_len]
    all_token_ids_stride: int,
    **launch: Any,
) -> None:
    """The token that follows each token of a step."""
    rows_np = rows.numpy()
    starts = query_start_loc.numpy()[: len(rows_np) + 1]
    owners, offsets = spans(np.diff(starts))
    token_rows = rows_np[owners]
    columns = num_computed.numpy()[token_rows] + 1 + offsets
    tokens = all_token_ids.numpy()
    # Nothing follows the last token of a full row; vLLM reads on there, and drops what
    # it finds.
    columns = np.minimum(columns, tokens.shape[1] - 1)
    output.numpy()[starts[0] : starts[-1]] = tokens[token_rows, columns]

# SPDX-License-Identifier: Apache-2.0
"""Kernels of spec_decode/rejection_sampler.py."""

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

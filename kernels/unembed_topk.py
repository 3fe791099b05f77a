# SPDX-License-Identifier: Apache-2.0
"""A rank's k best tokens of an early head, straight from the states that go into the unembedding.

Norm and T are applied before; the kernel would redo their product for every part of the vocabulary. It serves greedy
drafts and candidates: sampled drafts need logits of the whole vocabulary, DynaMo's heads the best 50 at a temperature.
"""

import torch
from torch.nn import functional

from vllm_ppd.kernels.early_topk import ShardTopK, shard_topk


def unembed_topk(
    hidden: torch.Tensor,  # [rows, hidden], T norm(h)
    unembedding: torch.Tensor,  # [shard width, hidden], padding included, of the same type
    k: int,
    vocab_start: int,
    num_valid: int,
    bias: torch.Tensor | None = None,  # [shard width]
    with_logsumexp: bool = True,
) -> ShardTopK:
    """shard_topk of E* h: logits are rounded to the states' type before they are compared, as an LM head's are.

    NaN is the greatest value, as in torch, and makes the row's log-sum-exp NaN. See shard_topk for the rest, including
    errors; merge_topk merges the ranks' results into the whole vocabulary's top-k and its probabilities.
    """
    logits = functional.linear(hidden, unembedding, bias)
    return shard_topk(logits, k, vocab_start, num_valid, with_logsumexp)

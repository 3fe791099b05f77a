# SPDX-License-Identifier: Apache-2.0
"""Top-k of an early head over a vocabulary that is split across tensor-parallel ranks.

Each rank reduces its own shard to (value, token id) pairs and one log-sum-exp; only
those are exchanged, so the traffic is k + 1 numbers per row and rank instead of a
vocabulary of logits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_ppd.kernels.sampling import INVALID


class ShardTopK(NamedTuple):
    """The top-k of one rank's shard."""

    values: Tensor  # [rows, k], descending
    # [rows, k] int64, ids in the whole vocabulary; INVALID where the value is not
    # finite
    token_ids: Tensor
    logsumexp: Tensor  # [rows], over the shard


def shard_topk(
    logits: Tensor,  # [rows, shard width], padding included
    k: int,
    vocab_start: int,
    num_valid: int,
    with_logsumexp: bool = True,
) -> ShardTopK:
    """Reduce one shard's logits to its k best entries.

    Args:
        logits: this rank's logits; columns from num_valid on are padding and are never
            returned.
        k: entries per row, 1 <= k <= num_valid.
        vocab_start: id of the shard's first token in the whole vocabulary.
        num_valid: number of columns that are real tokens.
        with_logsumexp: whether a probability will be needed; if not, the log-sum-exp is
            arbitrary, which saves a pass.
    """
    logits = logits[:, :num_valid]
    # max() is a single pass where topk() sorts; k = 1 is the common case.
    best = logits.max(dim=-1, keepdim=True) if k == 1 else logits.topk(k, dim=-1)
    values, ids = best
    logsumexp = values[:, 0]
    if with_logsumexp:
        logsumexp = torch.logsumexp(logits.float(), dim=-1)
    if vocab_start:
        ids += vocab_start
    # NaN, and so unequal to 0, where a value is not finite; isfinite is four kernels.
    ids.masked_fill_(values - values != 0, INVALID)
    return ShardTopK(values, ids, logsumexp)


def merge_topk(
    values: Tensor,  # [rows, shards, k]
    token_ids: Tensor,  # [rows, shards, k]
    logsumexps: Tensor,  # [rows, shards]
    k: int,
) -> tuple[Tensor, Tensor]:
    """Merge the shards' results into the top-k of the whole vocabulary.

    Ties go to the lower shard, hence to the lower token id, on every rank alike.

    Returns:
        (token ids [rows, k] int64, probabilities [rows, k] float32).
    """
    rows = values.shape[0]
    flat_values = values.reshape(rows, -1)
    # A stable sort makes the order of ties the same on every rank; topk promises no
    # order.
    order = flat_values.argsort(dim=-1, descending=True, stable=True)[:, :k]
    best = flat_values.gather(-1, order)
    ids = token_ids.reshape(rows, -1).gather(-1, order).to(torch.int64)
    total = torch.logsumexp(logsumexps, dim=-1, keepdim=True)
    return ids, (best - total).exp()

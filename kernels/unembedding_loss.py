# SPDX-License-Identifier: Apache-2.0
"""Losses through a frozen unembedding: gradients reach the states, and no row of logits
outlives its chunk.

The unembedding E is fixed, so the part of the gradient that depends on a row's logits
is computed in the forward pass, chunk after chunk, and memory is chunk x vocabulary for
any number of rows.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vllm_ppd.kernels.sampling import at_least_float32

# Logits held at once: as many as a CPU's caches hold (1.8 times faster than 2^23), or
# enough to fill a GPU.
CHUNK_ELEMENTS = {"cpu": 1 << 19}
# With fewer rows, each chunk reads a large unembedding for little work: 2.2 times
# slower with 16 rows of 49,152 tokens.
LEAST_ROWS = 128


def rows_a_chunk(unembedding: Tensor) -> int:
    """Rows whose logits are computed together."""
    elements = CHUNK_ELEMENTS.get(unembedding.device.type, 1 << 25)
    return max(LEAST_ROWS, elements // len(unembedding))


def _chunks(rows: int, unembedding: Tensor) -> Iterator[slice]:
    step = rows_a_chunk(unembedding)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The product of matrices; on a GPU, of two in 16 bits in float32."""
    if left.is_cuda and left.dtype.itemsize == 2:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap tanh(logits / cap), as Gemma 2 caps its logits; the logits if there is no cap."""
    return logits if cap is None else (logits / cap).tanh() * cap


def _slopes(logits: Tensor, cap: float) -> Tensor:
    """The derivatives of capped logits by the uncapped ones."""
    return 1 - (logits / cap).square()


def _logits(
    states: Tensor,
    unembedding: Tensor,
    bias: Tensor | None,
    cap: float | None = None,
) -> Tensor:
    """E h + bias, capped, at least float32: [rows, vocabulary]."""
    logits = _product(states.to(unembedding.dtype), unembedding.T)
    logits = at_least_float32(logits)
    return capped(logits if bias is None else logits + bias, cap)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        tokens: Tensor,
        unembedding: Tensor,
        bias: Any,
        cap: float | None,
    ) -> Any:
        dtype = unembedding.dtype
        result = torch.empty(
            tokens.shape,
            dtype=torch.promote_types(dtype, torch.float32),
            device=states.device,
        )
        # E^T softmax(E h): the term that the gradients of a row's tokens share, without
        # these tokens. The backward pass subtracts their own probabilities from their
        # weights, since near the optimum bfloat16 rounds two sums by more than they
        # differ.
        others = None
        slopes: Any = None  # of the tokens' logits, if those are capped
        if cap is not None:
            slopes = torch.empty_like(result)
        if ctx.needs_input_grad[0]:
            others = torch.empty_like(states, dtype=result.dtype)
        for part in _chunks(len(states), unembedding):
            logits = _logits(states[part], unembedding, bias, cap)
            total = torch.logsumexp(logits, dim=-1, keepdim=True)
            result[part] = logits.gather(1, tokens[part]) - total
            if cap is not None:
                slope = _slopes(logits, cap)
                slopes[part] = slope.gather(1, tokens[part])
            if others is not None:
                probs = logits.sub_(total).exp_()
                if cap is not None:
                    probs.mul_(slope)
                probs.scatter_(1, tokens[part], 0.0)
                others[part] = _product(probs.to(dtype), unembedding)
        ctx.save_for_backward(tokens, unembedding, others, result, slopes)
        ctx.dtype = states.dtype
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tokens, unembedding, others, log_probs, slopes = ctx.saved_tensors
        sums = grads[0].sum(1, keepdim=True)
        # A token that a row has twice counts once.
        same = tokens[:, :, None] == tokens[:, None]
        own = log_probs.exp().masked_fill(same.tril(-1).any(-1), 0.0)
        weights = grads[0] - sums * own
        if slopes is not None:
            weights = weights * slopes
        gradient = functional.embedding_bag(
            tokens,
            unembedding,
            per_sample_weights=weights.to(unembedding.dtype),
            mode="sum",
        )
        return (gradient - sums * others).to(ctx.dtype), None, None, None, None


def token_log_probs(
    states: Tensor,  # [rows, hidden]
    tokens: Tensor,  # [rows] int64, or [rows, k] of several tokens each
    unembedding: Tensor,  # [vocabulary, hidden], frozen
    bias: Tensor | None = None,  # [vocabulary]
    cap: float | None = None,  # of the logits
) -> Tensor:
    """log softmax(E h)[token] of each row, differentiable in the states: the tokens'
    shape, at least float32.
    """
    columns = tokens if tokens.dim() == 2 else tokens[:, None]
    log_probs = _TokenLogProbs.apply(states, columns, unembedding, bias, cap)
    return log_probs.view(tokens.shape)


@torch.no_grad()
def top_log_probs(
    states: Tensor,  # [rows, hidden]
    k: int,
    unembedding: Tensor,  # [vocabulary, hidden]
    bias: Tensor | None,  # [vocabulary]
    cap: float | None = None,  # of the logits
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of each row in descending order.

    Returns:
        (token IDs [rows, k] int64, their log softmax(E h) over the whole vocabulary
        [rows, k] float32).
    """
    ids = []
    log_probs = []
    for part in _chunks(len(states), unembedding):
        logits = _logits(states[part], unembedding, bias, cap)
        best = logits.topk(k, dim=-1)
        ids.append(best.indices)
        log_probs.append(
            best.values - torch.logsumexp(logits, dim=-1, keepdim=True)
        )
    return torch.cat(ids), torch.cat(log_probs)


class _KLToTeacher(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        students: Tensor,
        teacher: Tensor,
        unembedding: Tensor,
        bias: Any,
        compare: bool,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        exits, rows = students.shape[:2]
        device = students.device
        divergence = torch.empty(exits, rows, dtype=torch.float32, device=device)
        best = torch.zeros(exits, rows, dtype=torch.int64, device=device)
        gradient = torch.empty_like(students, dtype=unembedding.dtype)
        for part in _chunks(rows, unembedding):
            logits = _logits(teacher[part], unembedding, bias, cap)
            log_p = logits.log_softmax(-1)
            p = log_p.exp()
            negative_entropy = (p * log_p).sum(-1)
            for index in range(exits):
                logits = _logits(students[index, part], unembedding, bias, cap)
                total = torch.logsumexp(logits, dim=-1)
                if compare:
                    best[index, part] = logits.argmax(-1)
                cross_entropy = total - torch.linalg.vecdot(p, logits)
                divergence[index, part] = negative_entropy + cross_entropy
                if ctx.needs_input_grad[0]:
                    if cap is not None:
                        slope = _slopes(logits, cap)
                    difference = logits.sub_(total[:, None]).exp_().sub_(p)
                    if cap is not None:
                        difference.mul_(slope)
                    gradient[index, part] = (
                        difference.to(gradient.dtype) @ unembedding
                    )
        ctx.save_for_backward(gradient)
        ctx.dtype = students.dtype
        ctx.mark_non_differentiable(best)
        return divergence, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return (
            (grads[0][..., None] * gradient).to(ctx.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def kl_to_teacher(
    students: Tensor,  # [exits, rows, hidden], ready for the unembedding
    teacher: Tensor,  # [rows, hidden], final normed states
    unembedding: Tensor,  # [vocabulary, hidden], frozen
    bias: Tensor | None,  # [vocabulary]
    compare: bool = True,
    cap: float | None = None,  # of the logits
) -> tuple[Tensor, Tensor]:
    """KL(p* || p_theta) of every exit and row (ParaDecode, section 2.1); all exits
    share the teacher's logits.

    Returns:
        (KL in nats [exits, rows] float32, differentiable in the students; the students'
        likeliest tokens [exits, rows], 0 without compare, which costs a pass over the
        logits).
    """
    return _KLToTeacher.apply(students, teacher, unembedding, bias, compare, cap)

# SPDX-License-Identifier: Apache-2.0
"""The rank-r canonical decomposition of the next n tokens' probability, as a mixture of
r experts in log space.

P(x_1..x_n) = sum_a w_a prod_s P_a^(s)(x_s)   (CP heads, eq. 2)

Everything is computed and returned in float32 (float64 stays float64); logs are
natural.
"""

import torch
from torch import Tensor
from torch.nn import functional

from vllm_ppd.kernels.sampling import (
    INVALID,
    Sampling,
    at_least_float32,
    draw_rows,
)

# Floor of an expert's log-probability of a token; it keeps the weights finite where
# experts rule the token out.
RULED_OUT = -1e5


def posterior(
    log_weights: Tensor,  # [rows, r], before the token
    log_factor: Tensor,  # [rows, r], each expert's log-probability of the token
) -> Tensor:
    """The experts' log weights after observing a token, w'_a ~ w_a P_a(x), normalized:
    [rows, r].

    A token that every expert rules out leaves the weights as they were.
    """
    prior = at_least_float32(log_weights)
    updated = prior + at_least_float32(log_factor)
    ruled_out = updated.amax(dim=-1, keepdim=True) == float("-inf")
    return torch.log_softmax(torch.where(ruled_out, prior, updated), dim=-1)


def mixture(
    log_weights: Tensor,  # [rows, r], the posterior after the tokens so far
    log_factors: Tensor,  # [rows, r, vocab], of the next position
) -> Tensor:
    """Log-probabilities of the next token, logsumexp_a(log w'_a + log P_a^(s)(x)) (eq.
    11 to 13): [rows, vocab].

    As printed, eq. 13 lacks the factor of position s itself, and eq. 12 and 13 give the
    joint probability with the tokens before s, whereas sampling needs the conditional.
    Both are corrected here: the posterior weights are normalized, so the result is a
    distribution wherever the factors are.
    """
    log_weights = torch.log_softmax(at_least_float32(log_weights), dim=-1)
    return torch.logsumexp(
        log_weights.unsqueeze(-1) + at_least_float32(log_factors), dim=1
    )


def conditional_log_probs(
    log_weights: Tensor,  # [rows, r]
    log_factors: Tensor,  # [rows, n, r, k], at k tokens of each position
    # [rows, n, r], at the observed token of each position; 0 where it is not known
    observed: Tensor,
) -> Tensor:
    """log P(x | x_1..x_{s-1}) of each of the k tokens, the terms of eq. 9 for the
    observed ones: [rows, n, k]. Unknown observed tokens leave the weights alone.
    """
    terms = []
    for position, factors in enumerate(log_factors.unbind(dim=1)):
        terms.append(mixture(log_weights, factors))
        log_weights = posterior(log_weights, observed[:, position])
    return torch.stack(terms, dim=1)


def balance_loss(
    log_weights: Tensor,  # [tokens, r]
) -> Tensor:
    """sum_a (n_a / N - 1/r)^2, with n_a the tokens on which expert a has the largest
    weight (eq. 10): a scalar.

    The counts have no gradient, so this is a straight-through estimate: the value comes
    from the hard counts, the gradient from the mean soft weights. The loss is 0 for
    rank 1.
    """
    rank = log_weights.shape[1]
    weights = at_least_float32(log_weights).exp()
    soft = weights.mean(dim=0)
    assigned = functional.one_hot(weights.argmax(dim=-1), rank)
    hard = assigned.to(weights.dtype).mean(dim=0)
    return (hard + (soft - soft.detach()) - 1 / rank).square().sum()


@torch.no_grad()
def draft_chain(
    log_weights: Tensor,  # [rows, r], before the first position
    # [rows, n, r, vocab], of positions 1 to n, or of those that are drafted
    logits: Tensor,
    # [rows] int64, position 1; -1 where the logits have no entry for it
    first_token: Tensor | None,
    # of each row, at the position before the first draft
    sampling: Sampling | None = None,
    # [vocab] int64, the entries' token IDs; None: 0, 1, ...
    token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draft positions 2 to n; the first token and then each draft update the weights
    (section 2.4).

    The first token, which was not drawn from the mixture, updates the weights in log
    space. After that, probabilities suffice: where an expert's probability of a token
    underflows float32, another expert's dominates the sum.

    Greedy rows take the best token at each position. The joint's best chain, from a
    beam of 2 to 4 tokens per position, is accepted less often (0.306 to 0.316 drafts
    per step against 0.320, demo model), and so is its first draft.

    Args:
        log_weights: the experts' log weights given the context; given the first token,
            too, if first_token is None.
        logits: before eq. 6's softmax, in any floating-point type.
        first_token: the token that the target sampled; -1 leaves the weights as they
            are. None: draft all positions.
        sampling: rows at a temperature of at least 1e-5 sample in proportion to
            mixture^(1/temperature), as draw_rows does; the other rows take the arg-max
            (None: all rows do).
        token_ids: the entries' token IDs, on which the noise of samples depends.

    Returns:
        (entries [rows, drafts] int64, INVALID where the mixture is not finite; the log
        weights after the last draft [rows, r]).
    """
    # Keep the calls few: a pass over the model's weights evicts the code of each
    # operator from the caches.
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_weights = at_least_float32(log_weights)
    if first_token is not None:
        log_factors = torch.log_softmax(logits[:, 0], dim=-1, dtype=dtype)
        seen = _of_token(log_factors, first_token).clamp_(min=RULED_OUT)
        seen.masked_fill_((first_token < 0)[:, None], 0.0)
        # Relative to the best expert, or a token that all experts rule out would round
        # their weights.
        log_weights = log_weights + seen.sub_(seen.amax(dim=-1, keepdim=True))
        logits = logits[:, 1:]
    weights = torch.softmax(log_weights, dim=-1)
    all_factors = torch.softmax(logits, dim=-1, dtype=dtype)
    tokens = []
    for position, factors in enumerate(all_factors.unbind(dim=1)):
        probs = torch.bmm(weights.unsqueeze(1), factors).squeeze(1)
        if sampling is None:
            peak, best = probs.max(dim=-1)
            token = torch.where(peak.isfinite(), best, INVALID)
        else:
            token = draw_rows(probs.log(), sampling.ahead(position), token_ids)
        tokens.append(token)
        # A drawn token is possible under some expert.
        weights = weights * _of_token(factors, token)
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return torch.stack(tokens, dim=1), weights.log()


def _of_token(factors: Tensor, token: Tensor) -> Tensor:
    """Each expert's factor [rows, r] of a token [rows], from factors [rows, r, vocab];
    arbitrary for INVALID.
    """
    index = token.clamp(min=0)[:, None, None]
    index = index.expand(-1, factors.shape[1], 1)
    return factors.gather(-1, index).squeeze(-1)

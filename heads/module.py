# SPDX-License-Identifier: Apache-2.0
"""Parts that the torch modules of several kinds of heads share, and draft vocabularies:
which tokens they hold, and how many.

Most text consists of few tokens: drafting only the most frequent ones loses few drafts,
and saves reading the LM head's other rows (FR-Spec drafts from a quarter of a
vocabulary of 128K).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vllm_ppd.heads.base import HeadsConfig

# A function y = W x of a matrix W: [rows, in] to [rows, out]
Linear = Callable[[Tensor], Tensor]
# Sizes of draft vocabularies: a smaller one saves nothing more, and multiples suit
# matrix products
MIN_SIZE = 1024
GRAIN = 64
# Shares of the text
ALMOST_ALL = 0.99
MIN_SHARE = 0.9


class NamedWeights(nn.Module):
    """A module whose parameters are the tensors of a heads folder; counts are left out."""

    # Cap of the target's logits, for heads that read the target's LM head
    cap: float | None = None

    def __init__(
        self, config: HeadsConfig, tensors: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.config: Any = config
        # The names of parameters cannot have dots.
        self.weights = nn.ParameterDict(
            {
                name.replace(".", "/"): nn.Parameter(tensors[name])
                for name in config.shapes()
                if not config.is_count(name)
            }
        )

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by the names of the folder's tensors."""
        return {
            name.replace("/", "."): parameter
            for name, parameter in self.weights.items()
        }


def torch_linear(matrix: Tensor) -> Linear:
    """The product with a matrix [out, in]."""
    return lambda rows: functional.linear(rows, matrix)


def in_chunks(
    function: Callable[..., Tensor], size: int, *rows: Tensor
) -> Tensor:
    """A function of rows, computed chunk by chunk, and again in the backward pass.

    Args:
        function: maps tensors [chunk, ...] to a tensor [chunk, ...].
        size: rows of a chunk.
        rows: [rows, ...] each.
    """
    chunks = zip(*(tensor.split(size) for tensor in rows), strict=True)
    return torch.cat(
        [checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks]
    )


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """The ids of the most frequent tokens, from counts [vocabulary]: [size] int64, ascending."""
    return counts.double().topk(size).indices.sort().values


def columns(token_ids: Tensor, vocab_size: int) -> Tensor:
    """The index of each token of the vocabulary among some token ids, -1 if it is not
    one: [vocabulary] int64.
    """
    places = torch.full(
        (vocab_size,), -1, dtype=torch.int64, device=token_ids.device
    )
    places[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
    return places


def first_guess(counts: Tensor) -> int | None:
    """The recommended size before calibration, from the training text alone.

    It is the smallest that covers 99 % of the text, and at most a quarter of the
    vocabulary; None, the whole one, where that would leave out more than a tenth of the
    text.
    """
    descending = counts.double().sort(descending=True).values
    # Of the text that the 1, 2, ... most frequent tokens make up
    share = descending.cumsum(0) / descending.sum().clamp(min=1)
    enough = int((share < ALMOST_ALL).sum()) + 1
    grains = math.ceil(min(enough, len(counts) / 4) / GRAIN)
    size = max(MIN_SIZE, grains * GRAIN)
    return (
        size
        if size < len(counts) and float(share[size - 1]) >= MIN_SHARE
        else None
    )

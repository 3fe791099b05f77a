# SPDX-License-Identifier: Apache-2.0
"""Parts that the torch modules of several kinds of heads share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vllm_ppd.heads.base import HeadsConfig

# A function y = W x of a matrix W: [rows, in] to [rows, out]
Linear = Callable[[torch.Tensor], torch.Tensor]


class NamedWeights(nn.Module):
    """A module whose parameters are the tensors of a heads folder; counts are left out."""

    # [tokens], the part of the vocabulary that is trained; None: all of it. Not a
    # buffer: each run computes it from the data when it starts.
    token_ids: torch.Tensor | None = None

    def __init__(
        self, config: HeadsConfig, tensors: Mapping[str, torch.Tensor]
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

    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters by the names of the folder's tensors."""
        return {
            name.replace("/", "."): parameter
            for name, parameter in self.weights.items()
        }


def torch_linear(matrix: torch.Tensor) -> Linear:
    """The product with a matrix [out, in]."""
    return lambda rows: functional.linear(rows, matrix)


def in_chunks(
    function: Callable[..., torch.Tensor], size: int, *rows: torch.Tensor
) -> torch.Tensor:
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

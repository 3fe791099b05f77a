# SPDX-License-Identifier: Apache-2.0
"""A ridge regression over rows that come in parts: where heads start that read a state
linearly.
"""

import torch
from torch import Tensor

# Of the regression, relative to the mean square of its inputs
PENALTY = 1e-3
TOKENS = 1 << 16  # most tokens that a regression reads


class Ridge:
    """The sums of a ridge regression in which each block of inputs is penalized by its
    own scale.

    Args:
        size: of a block of inputs.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.gram = torch.zeros((), dtype=torch.float64)
        self.product = self.gram
        self.count = 0

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Add inputs [rows, in] and what they are to predict [rows, out]."""
        self.gram = self.gram + (inputs.T @ inputs).double().cpu()
        self.product = self.product + (inputs.T @ outputs).double().cpu()
        self.count += len(inputs)

    def solve(self) -> tuple[Tensor, float]:
        """The regression of all rows, at least one.

        Returns:
            (coefficients [in, out], float64 on the CPU; the root mean square of the
            predictions).
        """
        squares = self.gram.diagonal().view(-1, self.size).mean(dim=1)
        penalty = squares.clamp(min=1e-12).repeat_interleave(self.size) * PENALTY
        solution = torch.linalg.solve(self.gram + penalty.diag(), self.product)
        total = float((solution * (self.gram @ solution)).sum())
        return solution, (total / self.count / self.product.shape[1]) ** 0.5

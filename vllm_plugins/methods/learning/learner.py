# SPDX-License-Identifier: Apache-2.0
"""A recurrence that is learned from answers: the ridge regression of the state after a
token.

A state h and the token x after it predict the next state h':

    h' - h ~ A RMSNorm(h) + B RMSNorm(E[x])

which is the recurrence of CP heads without its gated layer. The sums of the regression
grow by a block of positions at once. A solution is made in slices, one a step: the
normal equations are solved by panels of columns, and the drafts of the result are
compared with the tokens at held-out positions. A slice has about as many operations as
the target has for two tokens, which are 48 d^2 for each layer, so no step takes much
longer for it.

The same code runs on the CPU and on a GPU, and nothing waits for the device.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group

from vllm_ppd.heads.cp.module import normed
from vllm_ppd.vllm_plugins.draft_length.learning import BLOCK, HELD
from vllm_ppd.vllm_plugins.engine.staging import DeviceCounts
from vllm_ppd.vllm_plugins.engine.target import Target
from vllm_ppd.vllm_plugins.methods.learning.pairs import Positions

# Of the regression, relative to the mean square of its inputs
PENALTY = 1e-2
# For each layer of the target on a rank:
COLUMNS = 6  # that a slice eliminates, by at most 8 d^2 operations each
ROWS = 3  # held-out positions that a slice compares


class Learner:
    """Learns for a drafter.

    Args:
        drafter: a LearnedDrafter, whose draft vocabulary each solution sets.
        target: loaded.
        held: HELD positions.
        layers: of the target, divided by the ranks that share each of them.

    Attributes:
        slices: of the solution in work; each is computed when it is asked for.
        result: how many solutions are finished; of the latest, see Report: accepted,
            gained, squares.
    """

    def __init__(
        self, drafter: Any, target: Target, held: Positions, layers: int
    ) -> None:
        self.drafter = drafter
        self.target = target
        self.held = held
        self.layers = layers
        size = target.hidden_size
        device = target.device
        self.gram, self._factor = torch.zeros(
            2, 2 * size, 2 * size, device=device
        )
        # [2 d, d]: inputs times what they predict, and coefficients
        self.product, self.solution = torch.zeros(
            2, 2 * size, size, device=device
        )
        self.counts = torch.zeros(
            target.vocab_size, dtype=torch.int64, device=device
        )
        # Accepted drafts of the latest solution and of the heads in use
        self._accepted, self._in_use = torch.zeros(
            2, HELD, dtype=torch.int64, device=device
        )
        self.result = DeviceCounts(4, device)
        self.slices: Iterator[None] = iter(())
        self._positions = 0  # in the sums

    def use(self, block: Positions) -> None:
        """Add a block of positions to the sums."""
        # A request's states that are not finite would remain in the sums
        states = block.states.float().nan_to_num(0.0, 0.0, 0.0)
        inputs = self._inputs(states[:, 0], block.tokens[:, 0])
        change = states[:, 1] - states[:, 0]
        self.gram.addmm_(inputs.T, inputs)
        self.product.addmm_(inputs.T, change)
        drafted = block.tokens[:, 1]
        self.counts.index_add_(0, drafted, torch.ones_like(drafted))
        self._positions += BLOCK

    def _inputs(self, states: Tensor, tokens: Tensor) -> Tensor:
        """[RMSNorm(h); RMSNorm(E[x])] [positions, 2 d]."""
        embedded = self.target.embed(tokens)
        return torch.cat(
            [normed(states.float()), normed(embedded.float())], dim=1
        )

    def solve(self) -> Iterator[None]:
        """A solution of the sums so far, and its comparison, in slices."""
        self._factor.copy_(self.gram)
        self._factor.diagonal().add_(PENALTY * self._positions)
        self.solution.copy_(self.product)
        yield
        self.drafter.vocabulary.choose(self.counts)
        yield
        yield from solve_in_slices(
            self._factor, self.solution, COLUMNS * self.layers
        )
        rows = ROWS * self.layers
        for start in range(0, HELD, rows):
            self._compare(slice(start, start + rows))
            yield
        gained = self._accepted - self._in_use
        result = self.result.value
        sums = [self._accepted.sum(), gained.sum(), gained.square().sum()]
        result[1:] = torch.stack(sums)
        result[0] += 1

    def _compare(self, rows: slice) -> None:
        """Count the drafts of the solution that are accepted at held-out positions."""
        vocabulary = self.drafter.vocabulary
        state = self.held.states[rows, 0].float()
        tokens = self.held.tokens[rows]
        right = torch.ones_like(tokens[:, 0])
        accepted = torch.zeros_like(right)
        for position in range(self.drafter.factors):
            inputs = self._inputs(state, tokens[:, position])
            state = state + inputs @ self.solution
            logits = vocabulary.logits(state.to(self.target.dtype))
            drafts = vocabulary.ids(logits.argmax(dim=-1))
            right = right * (drafts == tokens[:, position + 1])
            accepted += right
        self._accepted[rows] = accepted

    def install(self) -> None:
        """Draft by the latest solution, that of the first rank, from here on."""
        get_tp_group().broadcast(self.solution)
        self.drafter.install(self.solution)
        self._in_use.copy_(self._accepted)


def solve_in_slices(matrix: Tensor, values: Tensor, width: int) -> Iterator[None]:
    """Solve M X = Y in place for a positive definite M, by Gauss-Jordan elimination of a
    panel of columns at once, yielding between slices of at most 2 width n^2 operations.

    Args:
        matrix: M [n, n], overwritten.
        values: Y [n, columns], which becomes X.
        width: of a panel.
    """
    for start in range(0, len(matrix), width):
        panel = slice(start, start + width)
        right = matrix[:, start + width :]
        inverse = torch.linalg.inv_ex(matrix[panel, panel]).inverse
        values[panel] = inverse @ values[panel]
        right[panel] = inverse @ right[panel]
        column = matrix[:, panel].clone()
        column[panel] = 0
        values.addmm_(column, values[panel], alpha=-1)
        yield
        right.addmm_(column, right[panel], alpha=-1)
        yield

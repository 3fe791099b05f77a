# SPDX-License-Identifier: Apache-2.0
"""A learned mask for DynaMo's joint, beside the counted one of eq. 3.

Head i reads no token after its state, so it cannot know the newest token b, nor the
draft before its own. With E the target's embeddings, E* its LM head, and N an RMSNorm
without weights, the logit of token x becomes

    E*[x] (h_i + U_i N(E[b]) + A_i^T B_i N(E[x_{i-1}]))

The term of b changes the head's state, so it costs no further read of E*. That of the
draft before is a matrix of the candidates of two heads, from tables A_i E*[x] and
B_i N(E[x]) that hold R numbers a token.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vllm_ppd.heads.cp.module import normed
from vllm_ppd.heads.dynamo.config import MASK

TOKENS_AT_ONCE = 4096  # whose embeddings are read together


class PairTables(NamedTuple):
    """The mask's term of the draft before, by entries of the drafted vocabulary."""

    before: Tensor  # [heads - 1, entries, R], B_i N(E[x])
    after: Tensor  # [heads - 1, entries, R], A_i E*[x]

    def logits(self, entries: Tensor) -> Tensor:
        """What is added to the logits of a head's candidates, by the candidate of the
        head before: [heads - 1, rows, k, k] float32.

        Args:
            entries: candidates of each head, [heads, rows, k].
        """
        before = zip(self.before, entries[:-1], strict=False)
        after = zip(self.after, entries[1:], strict=False)
        read = torch.stack([table[some] for table, some in before])
        of_lm_head = torch.stack([table[some] for table, some in after])
        return (read @ of_lm_head.mT).float()


class LearnedMask(nn.Module):
    """The mask of a heads folder.

    Args:
        tensors: of the folder, those of the mask among them: `newest` U [n - 1, d, d];
            of three heads or more `before` B and `after` A [n - 2, R, d].
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {
                name.removeprefix(MASK): tensor
                for name, tensor in tensors.items()
                if name.startswith(MASK)
            }
        )

    def tensors(self) -> dict[str, Tensor]:
        """The weights by the names of the folder's tensors."""
        return {MASK + name: weight for name, weight in self.weights.items()}

    def forward(self, token: int, embedded: Tensor) -> Tensor:
        """What is added to the state of head 2, 3, ...: [rows, d].

        Args:
            token: of the head.
            embedded: embeddings of the newest token and those before the head's own,
                [rows, token - 1, d], or of the newest token alone.
        """
        newest = self.weights["newest"][token - 2]
        read = normed(embedded.to(newest.dtype))
        added = functional.linear(read[:, 0], newest)
        if read.shape[1] > 1:
            thin = functional.linear(
                read[:, -1], self.weights["before"][token - 3]
            )
            added = added + thin @ self.weights["after"][token - 3]
        return added

    def masked(self, states: Tensor, newest: Tensor) -> Tensor:
        """The states of heads 2, 3, ... given the newest token: [heads, rows, d].

        Args:
            states: of the heads, [heads, rows, d].
            newest: embeddings of the newest token, [rows, d].
        """
        if not self.weights:
            return states
        tokens = range(2, 2 + len(states))
        added = [self(token, newest[:, None]) for token in tokens]
        return states + torch.stack(added)

    @torch.no_grad()
    def tables(
        self,
        token_ids: Tensor,
        embed: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
    ) -> PairTables | None:
        """The tables of tokens [entries]; None if the mask joins no two heads.

        Args:
            token_ids: that are drafted.
            embed: E[x] of tokens [rows]: [rows, d].
            logits: E* h of states [rows, d], with a bias or not: [rows, entries].
        """
        if "before" not in self.weights:
            return None
        rows = self.weights["before"].flatten(0, 1)
        read = [
            functional.linear(normed(embed(some).to(rows.dtype)), rows)
            for some in token_ids.split(TOKENS_AT_ONCE)
        ]
        shape = self.weights["before"].shape[:2]
        after = self.weights["after"].flatten(0, 1)
        of_lm_head = logits(after) - logits(torch.zeros_like(after[:1]))
        return PairTables(
            torch.cat(read).T.unflatten(0, shape).mT.contiguous(),
            of_lm_head.unflatten(0, shape).mT.contiguous(),
        )

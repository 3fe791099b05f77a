# SPDX-License-Identifier: Apache-2.0
"""A prediction of what an engine does along a given text: where cycles start, and how many drafts each accepts."""

from typing import NamedTuple

import torch


class Drafted(NamedTuple):
    """Expected counts, in vLLM's terms; they add up over texts."""

    cycles: float  # forward passes after the prompt
    drafts: float  # passes with drafts to verify
    drafted: float  # drafted tokens
    accepted: float  # accepted tokens

    @property
    def rate(self) -> float:
        """Acceptance rate: accepted / drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def length(self) -> float:
        """Acceptance length: 1 + accepted / drafts, the bonus token included."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    def stored(self) -> dict[str, float]:
        """The fields of Counts."""
        sums = {name: round(value, 2) for name, value in self._asdict().items()}
        return sums | {"rate": round(self.rate, 4), "length": round(self.length, 4)}


def replay(
    accept: torch.Tensor,  # [texts, cycle starts, n] probability that draft i is accepted after those before it were
    lengths: torch.Tensor,  # [texts] tokens of each text, at most cycle starts + 1
    limit: torch.Tensor | None = None,  # [texts, cycle starts] drafts that a cycle makes there (None: n)
) -> Drafted:
    """Expected drafts and acceptances of an engine that emits exactly these texts.

    A cycle that starts at position t has emitted token t and drafts the n tokens after it. Given the text, rejection
    sampling accepted a token with probability min(1, q/p), greedy verification with 0 or 1: that is `accept`. The next
    cycle starts after the accepted tokens and the bonus token, so starts are followed as probability mass over
    positions, exactly and without drawing.
    """
    totals, accepted = _follow(accept, lengths, limit)
    cycles, drafts, drafted = totals.tolist()
    return Drafted(cycles, drafts, drafted, float(accepted.sum()))


def accepted_by_position(
    accept: torch.Tensor,  # [texts, cycle starts, n], as for replay
    lengths: torch.Tensor,  # [texts]
) -> list[float]:
    """Drafts accepted per cycle at each of the n positions, by the same replay; their sum is accepted / cycles."""
    totals, accepted = _follow(accept, lengths, None)
    return (accepted / totals[0].clamp(min=1)).tolist()


def _follow(
    accept: torch.Tensor, lengths: torch.Tensor, limit: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected cycles, drafts and drafted tokens [3]; accepted tokens by position [n]."""
    texts, starts, n = accept.shape
    accept = accept.double()
    mass = torch.zeros(texts, starts + n + 1, dtype=torch.float64, device=accept.device)
    mass[:, 0] = 1
    totals = torch.zeros(3, dtype=torch.float64, device=accept.device)
    accepted = torch.zeros(n, dtype=torch.float64, device=accept.device)
    for t in range(starts):
        # The engine does not draft beyond the text's end, where the last token is the cycle's bonus token.
        room = (lengths - t - 2).clamp(0, n)
        if limit is not None:
            room = torch.minimum(room, limit[:, t])
        allowed = torch.arange(n, device=accept.device)[None] < room[:, None]
        survive = torch.cumprod(accept[:, t] * allowed, dim=1)  # [texts, n] first i + 1 accepted
        here = mass[:, t]
        alive = here * (t < lengths - 1)
        totals += torch.stack([mass_of.sum() for mass_of in (alive, alive * (room > 0), alive * room)])
        accepted += (alive[:, None] * survive).sum(0)
        exactly = torch.cat([torch.ones_like(survive[:, :1]), survive], dim=1)
        exactly = exactly - torch.cat([survive, torch.zeros_like(survive[:, :1])], dim=1)
        mass[:, t + 1 : t + n + 2] += here[:, None] * exactly
    return totals, accepted

# SPDX-License-Identifier: Apache-2.0
"""Expected drafts of an engine along given texts: where its steps start, and how many
drafts each accepts.
"""

from typing import NamedTuple

import torch


class Drafted(NamedTuple):
    """Expected counts, in vLLM's terms; they add up over texts."""

    cycles: float  # forward passes after the prompt
    drafts: float  # passes with drafts to verify
    drafted: float  # drafted tokens
    accepted: float  # accepted tokens

    def stored(self) -> dict[str, float]:
        """The fields of Counts."""
        stored = {name: round(value, 2) for name, value in self._asdict().items()}
        stored["rate"] = round(self.accepted / max(self.drafted, 1e-9), 4)
        stored["length"] = round(1 + self.accepted / max(self.drafts, 1e-9), 4)
        return stored


def replay(
    # [texts, steps, n] P(draft i is accepted | those before it were)
    accept: torch.Tensor,
    lengths: torch.Tensor,  # [texts] tokens of each text, at most steps + 1
    limit: torch.Tensor
    | None = None,  # [texts, steps] drafts that a step makes there (None: n)
) -> Drafted:
    """Expected drafts and acceptances of an engine that emits exactly these texts.

    A step that starts at position t has emitted token t and drafts the n tokens after
    it. The next step starts after the accepted tokens and the bonus token. Starts are
    followed as probability mass over positions, exactly and without drawing.
    """
    texts, steps, n = accept.shape
    accept = accept.double()
    mass = torch.zeros(
        texts, steps + n + 1, dtype=torch.float64, device=accept.device
    )
    mass[:, 0] = 1
    totals = torch.zeros(4, dtype=torch.float64, device=accept.device)
    for t in range(steps):
        # The engine does not draft beyond the text's end, whose last token is the bonus
        # token.
        room = (lengths - t - 2).clamp(0, n)
        if limit is not None:
            room = torch.minimum(room, limit[:, t])
        allowed = torch.arange(n, device=accept.device)[None] < room[:, None]
        # [texts, n] first i + 1 accepted
        survive = torch.cumprod(accept[:, t] * allowed, dim=1)
        here = mass[:, t]
        alive = here * (t < lengths - 1)
        accepted = alive * survive.sum(1)
        counts = (alive, alive * (room > 0), alive * room, accepted)
        totals += torch.stack([count.sum() for count in counts])
        at_least = torch.nn.functional.pad(
            survive, (1, 0), value=1.0
        )  # [texts, n + 1]
        exactly = at_least - torch.nn.functional.pad(survive, (0, 1))
        mass[:, t + 1 : t + n + 2] += here[:, None] * exactly
    return Drafted(*totals.tolist())

# SPDX-License-Identifier: Apache-2.0
"""One way of drafting that was calibrated: what it costs in passes, and how much of it is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Work(NamedTuple):
    """What the drafts of a step read beside a full pass of the target."""

    layers: float  # decoder layers
    matrices: float  # d x d matrices of the heads
    reads: float  # reads of the whole LM head
    rows: int = 1  # hidden states of a request in each of these reads


class Setting(NamedTuple):
    """One way of drafting with heads, what it costs, and how much of it is accepted."""

    options: dict[str, Any]  # fields of the heads' configuration
    drafts: int  # most drafts a cycle, n
    drafted: float  # drafts a cycle, on average
    length: float  # tokens a cycle
    layers: float  # decoder layers that drafting adds to a pass, the heads' own d x d transforms among them
    reads: float  # reads of the whole LM head that it adds
    rows: int = 1  # hidden states of a request in each such read
    exit_layer: int | None = None  # where early drafts are read
    trained: bool = True  # whether by heads

    def cycle(self, num_layers: int, head_share: float) -> float:
        """Cost of a cycle in full passes at batch 1, where memory bandwidth is the limit; h is the LM head's share."""
        return 1 + self.layers * (1 - head_share) / num_layers + head_share * self.reads


def on_texts(by_texts: dict[str, Any], greedy: bool) -> Any:
    """What was measured on greedy texts, or on the sampled ones."""
    (name,) = (name for name in by_texts if (name == "greedy") == greedy)
    return by_texts[name]


def by_vocabulary(
    parts: dict[str, Any], vocab_size: int, greedy: bool
) -> Iterator[tuple[int | None, float, dict[str, Any]]]:
    """(draft vocabulary, None for the whole; its share of the vocabulary; acceptance), whole first.

    Shorter ones are measured on sampled texts only.
    """
    yield None, 1.0, on_texts(parts["acceptance"], greedy)
    if not greedy:
        for size, found in parts.get("vocabulary", {}).items():
            yield int(size), int(size) / vocab_size, found

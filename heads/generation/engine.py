# SPDX-License-Identifier: Apache-2.0
"""What the writer asks of an engine; vLLM's is behind it, and tests have their own."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Request(NamedTuple):
    """A text to continue."""

    key: str
    prompt: list[int]
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    stop_ids: tuple[int, ...] = ()
    stop_text: str | None = None
    wants_text: bool = False


class Continuation(NamedTuple):
    """What an engine wrote for a request."""

    key: str
    ids: list[int]  # the end-of-text or stop token included
    text: str  # without it; empty where it was not asked for
    finish_reason: str  # "stop" or "length"


class Engine(Protocol):
    """Many requests at once, each ended on its own."""

    generated: int  # tokens so far, those of requests that go on included

    def submit(self, request: Request) -> None:
        """Queue a request."""

    def step(self) -> list[Continuation]:
        """Compute one step of all requests; returns those that have ended."""

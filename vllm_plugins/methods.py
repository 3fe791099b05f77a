# SPDX-License-Identifier: Apache-2.0
"""The drafting methods: what each is called, which proposer runs it and which heads it reads."""

from __future__ import annotations

from typing import NamedTuple

_PROPOSERS = "vllm_ppd.vllm_plugins.proposers"


class Method(NamedTuple):
    """One way of drafting."""

    name: str  # as the start-up line has it
    proposer: str  # dotted path of its class
    heads: str  # kind of heads folder it reads
    needs_heads: bool
    cuts: bool  # runs parts of the target by themselves, so its family must have an adapter
    writes_ahead: bool  # writes KV of drafted positions before they are scheduled


_EARLY = Method("early drafting", f"{_PROPOSERS}.early.EarlyProposer", "early", False, True, True)

METHODS: dict[str, Method] = {
    "ppd": _EARLY,
    "paradecode": _EARLY,
    "cp": Method("CP drafting", f"{_PROPOSERS}.cp.CPProposer", "cp", True, False, False),
    "dynamo": Method("DynaMo drafting", f"{_PROPOSERS}.dynamo.DynaMoProposer", "dynamo", True, True, False),
}

# speculators' algorithm name of a heads folder -> the method that reads it.
METHOD_OF_HEADS = {"early": "ppd", "cp": "cp", "dynamo": "dynamo"}


def is_proposer(path: object) -> bool:
    """Whether a dotted path is that of one of our proposers."""
    return any(path == method.proposer for method in METHODS.values())

# SPDX-License-Identifier: Apache-2.0
"""The drafting methods: what each is called, which proposer runs it and which heads it reads."""

from __future__ import annotations

from typing import NamedTuple

_METHODS = "vllm_ppd.vllm_plugins.methods"


class Method(NamedTuple):
    """One way of drafting."""

    name: str  # as the start-up line has it
    proposer: str  # dotted path of its class
    heads: str  # kind of heads folder it reads
    needs_heads: bool
    cuts: bool  # runs parts of the target by themselves, so its family must have an adapter
    writes_ahead: bool  # writes KV of drafted positions before they are scheduled
    group: bool = False  # runs as a worker group over two pipeline stages


_EARLY = Method("early drafting", f"{_METHODS}.early_exit.proposer.EarlyProposer", "early", False, True, True)

METHODS: dict[str, Method] = {
    "ppd": _EARLY._replace(group=True),
    "paradecode": _EARLY,
    "cp": Method("CP drafting", f"{_METHODS}.cp.proposer.CPProposer", "cp", True, False, False),
    "dynamo": Method("DynaMo drafting", f"{_METHODS}.dynamo.proposer.DynaMoProposer", "dynamo", True, True, False),
}

# ParaDecode's own schedule of early drafting.
PARALLEL = f"{_METHODS}.paradecode.proposer.ParallelProposer"

# What vLLM starts in a proposer's place on the last stage of a worker group.
GROUP = "vllm_ppd.vllm_plugins.methods.pipeline.last_stage.LastStage"

# speculators' algorithm name of a heads folder -> the method that reads it.
METHOD_OF_HEADS = {"early": "ppd", "cp": "cp", "dynamo": "dynamo"}


def is_proposer(path: object) -> bool:
    """Whether a dotted path is that of one of our proposers."""
    return path in (GROUP, PARALLEL) or any(path == method.proposer for method in METHODS.values())

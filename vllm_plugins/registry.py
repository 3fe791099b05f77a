# SPDX-License-Identifier: Apache-2.0
"""The drafting methods, a record each: everything that lists methods asks these records."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from vllm_ppd.heads.registry import HEADS

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.drafting.drafter import Drafter

_METHODS = "vllm_ppd.vllm_plugins.methods"
_V1 = "vllm_ppd.vllm_plugins.integration.v1"
_V2 = "vllm_ppd.vllm_plugins.integration.v2"


@dataclass(frozen=True)
class MethodSpec:
    """One way of drafting. Classes are named by dotted paths, so that nothing loads before it is asked for."""

    title: str  # as the start-up line has it
    drafter: str  # its Drafter
    proposer: str = f"{_V1}.proposer.Proposer"  # what vLLM's runner V1 starts, which drives the drafter
    speculator: str | None = None  # what vLLM's runner V2 starts in its place; None: runner V1 alone
    heads: str | None = None  # kind of heads folder that it reads
    needs_heads: bool = False
    cuts: bool = False  # runs parts of the target by themselves, so its family must have an adapter
    writes_ahead: bool = False  # writes KV of drafted positions before they are scheduled
    options: tuple[str, ...] = ()  # options that other methods do not have
    request_options: tuple[str, ...] = ()  # the same, of a single request
    pipeline: str | None = None  # what runs it in place of proposer as a worker group over two pipeline stages
    parallel: str | None = None  # ... with schedule: parallel
    several_exits: str | None = None  # ... with more than one exit layer

    def new_drafter(self) -> Drafter:
        """A drafter of this method, not loaded yet."""
        return resolve_name(self.drafter)()


_EARLY = MethodSpec(
    "early drafting",
    drafter=f"{_METHODS}.early_exit.drafter.EarlyExitDrafter",
    proposer=f"{_V1}.deferred_kv.DeferredKVProposer",
    speculator=f"{_V2}.deferred_kv.DeferredKVSpeculator",
    heads="early",
    cuts=True,
    writes_ahead=True,
    options=("exit_layer", "gamma"),
    several_exits=f"{_METHODS}.paradecode.several_exits.SeveralExitsProposer",
)

METHODS: dict[str, MethodSpec] = {
    "ppd": replace(
        _EARLY, options=(*_EARLY.options, "candidates"), pipeline=f"{_METHODS}.pipeline.last_stage.LastStage"
    ),
    "paradecode": replace(
        _EARLY, options=(*_EARLY.options, "schedule"), parallel=f"{_METHODS}.paradecode.proposer.ParallelProposer"
    ),
    "cp": MethodSpec(
        "CP drafting",
        drafter=f"{_METHODS}.cp.drafter.CPDrafter",
        speculator=f"{_V2}.speculator.Speculator",
        heads="cp",
        needs_heads=True,
        options=("draft_vocab_size",),
    ),
    "dynamo": MethodSpec(
        "DynaMo drafting",
        drafter=f"{_METHODS}.dynamo.drafter.DynaMoDrafter",
        speculator=f"{_V2}.speculator.Speculator",  # its layers run with the target's, over every token
        proposer=f"{_METHODS}.dynamo.proposer.DynaMoProposer",
        heads="dynamo",
        needs_heads=True,
        cuts=True,
        options=("eps_b", "verify", "draft_vocab_size"),
        request_options=("eps_b",),
    ),
}


METHOD_OF_HEADS = {kind: heads.method for kind, heads in HEADS.items()}


def is_proposer(path: object) -> bool:
    """Whether a dotted path is what vLLM starts for one of our methods."""
    return isinstance(path, str) and any(
        path in (method.proposer, method.pipeline, method.parallel, method.several_exits) for method in METHODS.values()
    )

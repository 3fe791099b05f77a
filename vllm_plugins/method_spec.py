# SPDX-License-Identifier: Apache-2.0
"""The record of a drafting method. Its classes are dotted paths, so that nothing loads before it is asked for."""

from dataclasses import dataclass

ENGINE = "vllm_ppd.vllm_plugins.engine"


@dataclass(frozen=True)
class GroupSpec:
    """A worker group over two pipeline stages."""

    worker: str  # of both stages
    scheduler: str


@dataclass(frozen=True)
class MethodSpec:
    """A drafting method."""

    title: str  # as in the start-up log line
    drafter: str  # Drafter class
    proposer: str = f"{ENGINE}.v1.proposer.Proposer"  # drives the drafter on vLLM's runner V1
    speculator: str | None = None  # drives the drafter on runner V2; None: the method runs on V1 only
    heads: str | None = None  # kind of heads that the method reads
    needs_heads: bool = False
    looks_up_alone: bool = False  # drafts only from the requests' own texts
    cuts: bool = False  # runs parts of the target separately, so the family needs an adapter
    adds_layers: bool = False  # adds layers to the target, which some families do not support
    writes_ahead: bool = False  # writes KV of drafted positions before they are scheduled
    options: tuple[str, ...] = ()  # options of this method only
    request_options: tuple[str, ...] = ()  # the same for request options
    group: GroupSpec | None = None  # for worker groups over two pipeline stages
    parallel: str | None = None  # replaces proposer with schedule: parallel
    several_exits: str | None = None  # replaces proposer with more than one exit layer

    @property
    def proposers(self) -> set[str]:
        """The dotted paths of all classes that vLLM may start for this method."""
        paths = (self.proposer, self.parallel, self.several_exits)
        return {path for path in paths if path}

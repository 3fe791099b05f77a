# SPDX-License-Identifier: Apache-2.0
"""The record of a drafting method. Its classes are dotted paths, so that nothing loads before it is asked for."""

from dataclasses import dataclass

ENGINE = "vllm_ppd.vllm_plugins.engine"


@dataclass(frozen=True)
class GroupSpec:
    """A worker group over two pipeline stages."""

    proposer: str  # what vLLM starts on the last stage
    runner: str  # mixin over vLLM's V1 runner, on both stages
    scheduler: str


@dataclass(frozen=True)
class MethodSpec:
    """A drafting method."""

    title: str  # as the start-up line has it
    drafter: str  # its Drafter
    proposer: str = f"{ENGINE}.v1.proposer.Proposer"  # drives the drafter on vLLM's runner V1
    speculator: str | None = None  # drives it on runner V2; None: the method runs on V1 alone
    heads: str | None = None  # the kind of heads folder that it reads
    needs_heads: bool = False
    looks_up_alone: bool = False  # makes no drafts beside those that stand in the requests' own texts
    cuts: bool = False  # runs parts of the target by themselves, so its family must have an adapter
    adds_layers: bool = False  # adds layers to the target, which not every family takes
    writes_ahead: bool = False  # writes KV of drafted positions before they are scheduled
    options: tuple[str, ...] = ()  # options that other methods do not have
    request_options: tuple[str, ...] = ()  # the same, of a single request
    group: GroupSpec | None = None  # runs it as a worker group over two pipeline stages
    parallel: str | None = None  # in place of proposer with schedule: parallel
    several_exits: str | None = None  # in place of proposer with more than one exit layer

    @property
    def proposers(self) -> set[str]:
        """The dotted paths of all classes that vLLM may start for this method."""
        paths = (self.proposer, self.group and self.group.proposer, self.parallel, self.several_exits)
        return {path for path in paths if path}

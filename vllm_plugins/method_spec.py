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
    speculator: str = f"{ENGINE}.v2.speculator.Speculator"  # drives the drafter on vLLM's model runner V2
    heads: str | None = None  # kind of heads that the method reads
    needs_heads: bool = False
    looks_up_alone: bool = False  # drafts only from the requests' own texts
    cuts: bool = False  # runs parts of the target separately, so the family needs an adapter
    adds_layers: bool = False  # adds layers to the target, which some families do not support
    writes_ahead: bool = False  # writes KV of drafted positions before they are scheduled
    options: tuple[str, ...] = ()  # options of this method only
    request_options: tuple[str, ...] = ()  # the same for request options
    group: GroupSpec | None = None  # for worker groups over two pipeline stages

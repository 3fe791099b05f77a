# SPDX-License-Identifier: Apache-2.0
"""The drafting methods by name: everything that lists methods asks these records."""

from __future__ import annotations

from dataclasses import replace

from vllm_ppd.heads.registry import HEADS
from vllm_ppd.vllm_plugins.method_spec import MethodSpec
from vllm_ppd.vllm_plugins.methods import cp, dynamo, early, group

METHODS: dict[str, MethodSpec] = {
    "ppd": replace(early.METHOD, options=(*early.METHOD.options, "candidates"), group=group.GROUP),
    "paradecode": replace(early.METHOD, options=(*early.METHOD.options, "schedule"), parallel=early.PARALLEL),
    "cp": cp.METHOD,
    "dynamo": dynamo.METHOD,
}

METHOD_OF_HEADS = {kind: heads.method for kind, heads in HEADS.items()}


def is_proposer(path: object) -> bool:
    """Whether a dotted path is what vLLM starts for one of our methods."""
    return isinstance(path, str) and any(path in method.proposers for method in METHODS.values())

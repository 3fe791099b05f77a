# SPDX-License-Identifier: Apache-2.0
"""The records of the drafting methods by name, which everything that lists methods reads."""

from dataclasses import replace

from vllm_ppd.vllm_plugins.method_spec import MethodSpec
from vllm_ppd.vllm_plugins.methods import cp, dynamo, early, group, lookup, recurrent

METHODS: dict[str, MethodSpec] = {
    "ppd": replace(early.METHOD, options=(*early.METHOD.options, "candidates"), group=group.GROUP),
    "paradecode": early.METHOD,
    "cp": cp.METHOD,
    "dynamo": dynamo.METHOD,
    "lookup": lookup.METHOD,
    "recurrent": recurrent.METHOD,
}


# The first method of each kind of heads.
METHOD_OF_HEADS = {method.heads: name for name, method in reversed(METHODS.items()) if method.heads is not None}


def is_speculator(path: object) -> bool:
    """Whether a dotted path is what vLLM starts for one of our methods."""
    return any(path == method.speculator for method in METHODS.values())

# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup alone: drafts from the requests' own texts, for a target without heads."""

from vllm_ppd.vllm_plugins.method_spec import MethodSpec

METHOD = MethodSpec(
    "prompt lookup",
    drafter=f"{__name__}.drafter.LookupDrafter",
    looks_up_alone=True,
)

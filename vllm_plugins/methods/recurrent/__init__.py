# SPDX-License-Identifier: Apache-2.0
"""Recurrent drafting: a state that reads the newest token and each draft, as IBM's and Arctic's speculators do."""

from vllm_ppd.vllm_plugins.method_spec import ENGINE, MethodSpec

METHOD = MethodSpec(
    "recurrent drafting",
    drafter=f"{__name__}.drafter.RecurrentDrafter",
    speculator=f"{ENGINE}.v2.speculator.Speculator",
    heads="recurrent",
    needs_heads=True,
    options=("draft_vocab_size",),
)

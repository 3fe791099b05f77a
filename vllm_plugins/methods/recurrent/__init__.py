# SPDX-License-Identifier: Apache-2.0
"""Recurrent drafting: a state that reads the newest token and each draft, as IBM's and Arctic's speculators do."""

from vllm_ppd.vllm_plugins.method_spec import MethodSpec

METHOD = MethodSpec(
    "recurrent drafting",
    drafter=f"{__name__}.drafter.RecurrentDrafter",
    heads="recurrent",
    needs_heads=True,
    options=("draft_vocab_size",),
)

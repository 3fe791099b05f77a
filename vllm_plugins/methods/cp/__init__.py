# SPDX-License-Identifier: Apache-2.0
"""CP drafting: a mixture of experts over the target's last hidden state."""

from vllm_ppd.vllm_plugins.method_spec import MethodSpec

METHOD = MethodSpec(
    "CP drafting",
    drafter=f"{__name__}.drafter.CPDrafter",
    heads="cp",
    needs_heads=True,
    options=("draft_vocab_size",),
)

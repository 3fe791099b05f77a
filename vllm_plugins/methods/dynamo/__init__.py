# SPDX-License-Identifier: Apache-2.0
"""DynaMo drafting: token heads beside the target's last layer, and the joint over their tokens."""

from vllm_ppd.vllm_plugins.method_spec import MethodSpec

METHOD = MethodSpec(
    "DynaMo drafting",
    drafter=f"{__name__}.drafter.DynaMoDrafter",
    heads="dynamo",
    needs_heads=True,
    cuts=True,
    adds_layers=True,
    options=("eps_b", "verify", "draft_vocab_size"),
    request_options=("eps_b",),
)

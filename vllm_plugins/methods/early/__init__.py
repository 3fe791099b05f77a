# SPDX-License-Identifier: Apache-2.0
"""Early drafting (PPD, ParaDecode): drafts are read at an exit layer, and the next step completes their deeper KV."""

from vllm_ppd.vllm_plugins.method_spec import MethodSpec

METHOD = MethodSpec(
    "early drafting",
    drafter=f"{__name__}.drafter.EarlyExitDrafter",
    speculator=f"{__name__}.speculator.DeferredKVSpeculator",
    heads="early",
    cuts=True,
    writes_ahead=True,
    options=("exit_layer", "gamma"),
)

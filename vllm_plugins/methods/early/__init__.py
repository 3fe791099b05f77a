# SPDX-License-Identifier: Apache-2.0
"""Early drafting (PPD, ParaDecode): drafts are read at an exit layer, and the next step completes their deeper KV."""

from vllm_ppd.vllm_plugins.method_spec import MethodSpec

METHOD = MethodSpec(
    "early drafting",
    drafter=f"{__name__}.drafter.EarlyExitDrafter",
    proposer=f"{__name__}.proposer.DeferredKVProposer",
    speculator=f"{__name__}.speculator.DeferredKVSpeculator",
    heads="early",
    cuts=True,
    writes_ahead=True,
    options=("exit_layer", "gamma"),
    several_exits=f"{__name__}.several_exits.SeveralExitsProposer",
)
PARALLEL = f"{__name__}.parallel_proposer.ParallelProposer"

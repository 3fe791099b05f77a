# SPDX-License-Identifier: Apache-2.0
"""The worker group (PPD, Algorithm 2): early drafting over two pipeline stages that work at the same time."""

from vllm_ppd.vllm_plugins.method_spec import GroupSpec

GROUP = GroupSpec(
    proposer=f"{__name__}.last_stage.LastStage",
    runner=f"{__name__}.runner.GroupRunnerMixin",
    scheduler=f"{__name__}.scheduler.GroupScheduler",
)

# SPDX-License-Identifier: Apache-2.0
"""The worker of a worker group's stage: ours of runner V2, with the group's model runner."""

import os
from typing import Any

from vllm_ppd.vllm_plugins.config.activation import required_config
from vllm_ppd.vllm_plugins.config.resolved import PARTITION
from vllm_ppd.vllm_plugins.engine.graph_modes import without_full_graphs
from vllm_ppd.vllm_plugins.engine.v2.worker import DraftingWorker, ModelRunner
from vllm_ppd.vllm_plugins.methods.group.runner import GroupRunnerMixin


class GroupModelRunner(GroupRunnerMixin, ModelRunner):
    """vLLM's model runner V2 of the platform as a stage."""


class GroupWorker(DraftingWorker):
    """Our worker of the platform as a stage."""

    runner_class = GroupModelRunner

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        # vLLM reads the layers of a stage from here; the variable is set in the stage's process only.
        os.environ[PARTITION] = required_config(vllm_config, self).partition
        without_full_graphs(vllm_config.compilation_config)
        super().__init__(vllm_config, *args, **kwargs)

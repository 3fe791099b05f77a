# SPDX-License-Identifier: Apache-2.0
"""The worker of a worker group's stage: ours, with the group's model runner."""

import os
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.logger import init_logger

from vllm_ppd.vllm_plugins.config.activation import required_config
from vllm_ppd.vllm_plugins.engine.worker import DraftingWorker, ModelRunner
from vllm_ppd.vllm_plugins.methods.group.runner import GroupRunnerMixin
from vllm_ppd.vllm_plugins.platform import PARTITION

logger = init_logger("vllm.vllm_ppd")


class GroupModelRunner(GroupRunnerMixin, ModelRunner):
    """vLLM's model runner V2 of the platform as a stage."""


class GroupWorker(DraftingWorker):
    """Our worker of the platform as a stage."""

    runner_class = GroupModelRunner

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        # vLLM reads the layers of a stage from here; the variable is set in the stage's
        # process only.
        os.environ[PARTITION] = required_config(vllm_config, self).partition
        without_full_graphs(vllm_config.compilation_config)
        super().__init__(vllm_config, *args, **kwargs)


def without_full_graphs(compilation: Any) -> None:
    """Replace graphs of the whole model, which cannot run its halves, by those between
    attention calls if vLLM can.
    """
    mode = compilation.cudagraph_mode
    if not mode.has_full_cudagraphs():
        return
    if mode.requires_piecewise_compilation():
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        logger.info(
            "vllm-ppd: CUDA graphs between attention calls instead of whole-model "
            "graphs (%s)",
            mode,
        )
        return
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    logger.warning(
        "vllm-ppd: running without CUDA graphs, as whole-model graphs (%s) cannot "
        "run its halves; use cudagraph_mode FULL_AND_PIECEWISE or PIECEWISE",
        mode,
    )

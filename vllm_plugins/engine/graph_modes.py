# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of a target whose parts run apart."""

from typing import Any

from vllm.config import CUDAGraphMode
from vllm.logger import init_logger

logger = init_logger("vllm.vllm_ppd")


def without_full_graphs(compilation: Any) -> None:
    """Replace graphs of the whole model, which cannot run its halves, by those between attention calls if vLLM can."""
    mode = compilation.cudagraph_mode
    if not mode.has_full_cudagraphs():
        return
    if mode.requires_piecewise_compilation():
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        logger.info("vllm-ppd: CUDA graphs between attention calls instead of whole-model graphs (%s)", mode)
        return
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    logger.warning(
        "vllm-ppd: running without CUDA graphs, as whole-model graphs (%s) cannot run its halves; "
        "use cudagraph_mode FULL_AND_PIECEWISE or PIECEWISE",
        mode,
    )

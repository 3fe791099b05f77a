# SPDX-License-Identifier: Apache-2.0
"""The target's final norm outside of compiled code, with vLLM's own kernel.

When vLLM compiles the model, the norms consist of torch operations that only
torch.compile fuses; outside of compiled code, such a norm takes about ten launches.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from vllm import ir
from vllm.platforms import current_platform

KERNEL = "vllm_c"  # vLLM's name for its compiled kernels


@contextmanager
def kernels_first() -> Iterator[None]:
    """Let vLLM's RMSNorm run as one kernel if the platform has it; otherwise nothing changes."""
    with ExitStack() as undo:
        for op in _norms() if current_platform.is_cuda_alike() else ():
            priority = op.get_priority()
            if KERNEL in op.impls and priority[:1] != [KERNEL]:
                undo.enter_context(
                    op.set_priority([KERNEL, *(priority or ["native"])])
                )
        yield


def _norms() -> tuple[Any, ...]:
    return ir.ops.rms_norm, ir.ops.fused_add_rms_norm

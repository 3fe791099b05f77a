# SPDX-License-Identifier: Apache-2.0
"""Workarounds for vLLM 0.32's CPU backend.

Without the first, sampling with drafts has the wrong distribution: `expand_kernel`
spreads per-request sampling parameters over draft tokens. For float32 and int32 outputs
it fills a converted copy and drops it, so temperature, top-k and top-p of verified
drafts are whatever the memory held. vLLM's own speculative methods, which run on its
runner V1 there, are affected; greedy requests are not.

Without the second, ranks that die leave their shared memory behind.
"""

import glob
from pathlib import Path
from typing import Any

import torch


def expand(
    output: torch.Tensor,  # [tokens]
    input_val: torch.Tensor,  # [requests]
    cu_num_tokens: torch.Tensor,  # [requests] cumulative tokens
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """output = each request's value, repeated per token, with replace_from replaced by
    replace_to.
    """
    counts = torch.diff(
        cu_num_tokens.long(), prepend=torch.zeros(1, dtype=torch.long)
    )
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    output.copy_(values.repeat_interleave(counts))


def mend_workers_to_come() -> None:
    """Let workers that this process starts later register our kernel, for vLLM's own methods."""
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand


def unlink_shared_memory(*groups: Any) -> None:
    """Unlink the shared memory of process groups whose ranks have all mapped it.

    It is then freed with the last process that has it mapped, however that ends. Groups
    without any are left alone.
    """
    for group in groups:
        communicator = getattr(group.device_communicator, "dist_module", None)
        name = getattr(communicator, "group_name", None)
        if name:
            for path in Path("/dev/shm").glob(f"{glob.escape(name)}_*"):
                path.unlink(missing_ok=True)  # another rank may remove it first

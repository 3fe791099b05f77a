# SPDX-License-Identifier: Apache-2.0
"""The choice of an implementation: the torch reference, or its Triton namesake for
tensors on a GPU.

A reference `kernels/<module>.py:<name>` has its kernel in
`kernels/<module>_triton.py:<name>`, with the same signature.
"""

import importlib
import os
from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch

# Environment variable: 0 keeps every function on its torch reference; "always" runs
# every kernel, even on the CPU, where only Triton's interpreter can run it
# (TRITON_INTERPRET=1).
SWITCH = "VLLM_PPD_TRITON"

P = ParamSpec("P")
R = TypeVar("R")


def chosen(reference: Callable[P, R], tensor: torch.Tensor) -> Callable[P, R]:
    """The implementation of a reference for the device of a tensor: `chosen(stage,
    hidden)(...)`.

    It is Triton's if the tensor is on a GPU and VLLM_PPD_TRITON is not 0; else the
    reference.
    """
    wanted = os.environ.get(SWITCH, "1")
    may_run = tensor.is_cuda or wanted == "always"
    if may_run and wanted != "0":
        return namesake(reference)
    return reference


@cache
def namesake(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Import Triton and return its implementation of a reference."""
    return getattr(
        importlib.import_module(f"{reference.__module__}_triton"),
        reference.__name__,
    )

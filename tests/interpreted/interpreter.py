# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runner V2 on a machine without a GPU: every Triton kernel runs in
Triton's interpreter.

prepare() comes before anything imports vLLM, TRITON_INTERPRET=1 before anything imports
Triton. Works around what Triton 3.9's interpreter lacks for vLLM's kernels.
"""

import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

COMPARISONS = ("create_icmp", "create_fcmp")


def prepare() -> None:
    """Have this process's vLLM find Triton, and run its kernels interpreted.

    Raises:
        RuntimeError: if vLLM has been imported.
    """
    if "vllm" in sys.modules or os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "vLLM has looked for Triton already: run the V2 tests in a process of "
            "their own"
        )
    import triton.backends

    # A CPU build of vLLM has Triton only where Triton has a backend named cpu
    # (vllm/triton_utils/importing.py).
    inactive = type("Driver", (), {"is_active": staticmethod(lambda: False)})
    triton.backends.backends.setdefault(
        "cpu", types.SimpleNamespace(driver=inactive, compiler=None)
    )
    _compare_to_bits()
    _provide_libdevice()
    _keep_lookups()
    import vllm.v1.sample.ops.topk_topp_sampler as sampler

    # Its kernel of top-k and top-p does not run interpreted; torch's does
    sampler.HAS_TRITON = False


def _compare_to_bits() -> None:
    """A comparison keeps its operands' type in the interpreter: masks are refused, and
    ~mask is true everywhere.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def as_bits(compare: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, left, right: TensorHandle(
            compare(self, left, right).data.astype(bool), tl.int1
        )

    for name, compare in list(vars(InterpreterBuilder).items()):
        if name.startswith(COMPARISONS):
            setattr(InterpreterBuilder, name, as_bits(compare))


def _provide_libdevice() -> None:
    """libdevice's functions do not exist in the interpreter: log1p of the rejection
    sampler, isnan of a metric.
    """
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle

    def log1p(x: Any) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            return tl.core.tensor(
                TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type
            )

    def isnan(x: Any) -> Any:
        return tl.core.tensor(
            TensorHandle(np.isnan(x.handle.data), tl.int1),
            tl.block_type(tl.int1, x.shape),
        )

    libdevice.log1p = log1p
    libdevice.isnan = isnan


def _keep_lookups() -> None:
    """For speed alone: a call patches all of triton.language anew, an operation
    rebuilds a table of types.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    stock = interpreter._get_np_dtype
    patch = interpreter._patch_lang
    of_scalar = functools.cache(stock)

    def numpy_type(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        # Pointers have no hash
        return of_scalar(scalar) if type(scalar) is tl.dtype else stock(scalar)

    patched: list[Any] = []

    def patch_once(function: Any) -> Any:
        if not patched:
            globals_ = {"tl": tl, "core": tl.core}
            patched.append(
                patch(types.FunctionType(compile("0", "", "eval"), globals_))
            )
        return interpreter._LangPatchScope()

    interpreter._get_np_dtype = numpy_type
    interpreter._patch_lang = patch_once

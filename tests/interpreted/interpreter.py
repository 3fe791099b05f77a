# SPDX-License-Identifier: Apache-2.0
"""Processes in which every Triton kernel runs in Triton's interpreter, on a machine
without a GPU; and vLLM's model runner V2 in them.

prepare() comes before anything imports vLLM, TRITON_INTERPRET=1 before anything imports
Triton. Works around what Triton 3.9's interpreter lacks for vLLM's kernels.
"""

import functools
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllm_ppd.kernels.sampling import UNLIMITED, Sampling

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPARISONS = ("create_icmp", "create_fcmp")


def run_cases(*arguments: Any) -> None:
    """Run pytest in a process of its own: the interpreter must be chosen before Triton
    is imported.
    """
    environment = os.environ | {"PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    if DEVICE == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", *map(str, arguments)]
    run = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


def seeded(
    heat: list[float],
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
) -> Sampling:
    """Rows at temperatures and with limits, with seeds of all 64 bits."""
    rows = len(heat)
    columns = [heat, top_k or [UNLIMITED] * rows, top_p or [1.0] * rows]
    generator = torch.Generator().manual_seed(rows)
    seeds = torch.randint(
        -(1 << 63), (1 << 63) - 1, (rows,), generator=generator, device="cpu"
    )
    return Sampling(
        *(torch.tensor(column, device=DEVICE) for column in columns),
        seeds=seeds.to(DEVICE),
        positions=torch.arange(rows, device=DEVICE) * 1000,
    )


@functools.cache
def prepare() -> None:
    """Have this process's vLLM find Triton, and run its kernels interpreted; once.

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
    """libdevice's functions do not exist in the interpreter: isnan of a metric."""
    from triton.language.extra import libdevice

    libdevice.isnan = lambda x: x != x


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

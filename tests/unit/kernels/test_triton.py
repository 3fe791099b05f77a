# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against their torch references: on the GPU where there is one,
else in Triton's interpreter.

Each file of triton_cases runs in a process of its own: the interpreter must be chosen
before Triton is imported.
"""

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_ppd.kernels.dispatch import SWITCH, chosen, namesake

ROOT = Path(__file__).resolve().parents[3]
CASES = sorted((ROOT / "tests" / "triton_cases").glob("*.py"))
MODULES = [path.stem for path in CASES]

triton = pytest.importorskip("triton")


def run(path: Path) -> str:
    environment = dict(os.environ, PYTEST_ADDOPTS="")
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", str(path)]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    return result.stdout


@pytest.mark.parametrize("path", CASES, ids=MODULES)
def test_kernels(path: Path) -> None:
    assert " passed" in run(path)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the cases above compile and run the kernels here"
)
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    environment = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    command = [sys.executable, str(ROOT / "tests" / "compile_kernels.py"), "90"]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr[-4000:]
    compiled = set(result.stdout.split())
    for module in MODULES:
        names = vars(importlib.import_module(f"vllm_ppd.kernels.{module}_triton"))
        launched = {
            name
            for name, value in names.items()
            if isinstance(value, triton.JITFunction) and name[0] == "_"
        }
        helpers = {
            "_blurred",
            "_digits",
            "_kept",
            "_least",
            "_limited",
            "_marginal",
            "_mass",
            "_mixed",
            "_near",
            "_threshold",
        }
        assert {f"{module}_triton.{name}" for name in launched - helpers} <= compiled


def test_every_kernel_has_cases() -> None:
    assert sorted(f"{name}_triton" for name in MODULES) == sorted(
        path.stem for path in (ROOT / "kernels").glob("*_triton.py")
    )


@pytest.mark.parametrize("module", MODULES)
def test_a_kernel_has_its_reference_s_signature(module: str) -> None:
    implementation = importlib.import_module(f"vllm_ppd.kernels.{module}_triton")
    reference = importlib.import_module(f"vllm_ppd.kernels.{module}")
    shared = [
        name
        for name, function in vars(implementation).items()
        if inspect.isfunction(function)
        and function.__module__ == implementation.__name__
        and hasattr(reference, name)
    ]
    assert shared
    for name in shared:
        ours, theirs = (
            inspect.signature(getattr(m, name), eval_str=True)
            for m in (implementation, reference)
        )
        assert ours == theirs, name
        assert namesake(getattr(reference, name)) is getattr(implementation, name)


class OnGPU:
    """What the dispatch looks at."""

    is_cuda = True


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ppd.kernels.staging import stage
    from vllm_ppd.kernels.staging_triton import stage as kernel

    monkeypatch.delenv(SWITCH, raising=False)
    assert chosen(stage, torch.ones(1)) is stage
    assert chosen(stage, OnGPU()) is kernel  # type: ignore[arg-type]
    monkeypatch.setenv(SWITCH, "always")
    assert chosen(stage, torch.ones(1)) is kernel
    monkeypatch.setenv(SWITCH, "0")
    assert chosen(stage, OnGPU()) is stage  # type: ignore[arg-type]

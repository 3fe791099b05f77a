# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against their torch references: on the GPU where there is one,
else in Triton's interpreter.
"""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import full_but
from interpreter import ROOT, run_cases

from vllm_ppd.kernels.dispatch import SWITCH, chosen, namesake

CASES = ROOT / "tests" / "triton_cases"
MODULES = [path.stem for path in (ROOT / "kernels").glob("*_triton.py")]

triton = pytest.importorskip("triton")


@pytest.mark.parametrize("marked", full_but({"not full"}, ("not full", "full")))
def test_kernels(marked: str) -> None:
    cases = [CASES / f"{name.removesuffix('_triton')}.py" for name in MODULES]
    run_cases("--noconftest", "-m", marked, *cases)


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="the cases above compile and run the kernels here",
)
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    environment = dict(
        os.environ, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0"
    )
    command = [sys.executable, str(ROOT / "tests" / "compile_kernels.py"), "90"]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr[-4000:]
    source = "".join(
        (ROOT / f"kernels/{name}.py").read_text() for name in MODULES
    )
    launched = set(re.findall(r"(\w+)\[\(", source))
    assert launched and set(result.stdout.split()) == launched


@pytest.mark.parametrize("module", MODULES)
def test_a_kernel_has_its_reference_s_signature(module: str) -> None:
    implementation = importlib.import_module(f"vllm_ppd.kernels.{module}")
    name_of_reference = module.removesuffix("_triton")
    reference = importlib.import_module(f"vllm_ppd.kernels.{name_of_reference}")
    shared = vars(reference).keys() & {
        name
        for name, function in vars(implementation).items()
        if inspect.isfunction(function)
        and function.__module__ == implementation.__name__
    }
    assert shared
    for name in shared:
        ours = getattr(implementation, name)
        theirs = getattr(reference, name)
        assert inspect.signature(ours, eval_str=True) == inspect.signature(
            theirs, eval_str=True
        )
        assert namesake(theirs) is ours


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ppd.kernels.staging import stage
    from vllm_ppd.kernels.staging_triton import stage as kernel

    on_gpu: Any = SimpleNamespace(is_cuda=True)
    monkeypatch.delenv(SWITCH, raising=False)
    assert chosen(stage, torch.ones(1)) is stage
    assert chosen(stage, on_gpu) is kernel
    monkeypatch.setenv(SWITCH, "always")
    assert chosen(stage, torch.ones(1)) is kernel
    monkeypatch.setenv(SWITCH, "0")
    assert chosen(stage, on_gpu) is stage

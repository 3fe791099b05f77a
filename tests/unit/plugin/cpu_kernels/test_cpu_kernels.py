# SPDX-License-Identifier: Apache-2.0
"""Our kernels of runner V2 against vLLM's own, which run in Triton's interpreter.

The cases are tests/v2_kernels. They run in a process of their own, in which vLLM finds
Triton.
"""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

CASES = ROOT / "tests" / "v2_kernels"

pytest.importorskip("triton")


def test_kernels_are_vllm_s() -> None:
    environment = dict(
        os.environ, PYTEST_ADDOPTS="", TRITON_INTERPRET="1", OMP_NUM_THREADS="1"
    )
    files = [
        str(path)
        for path in sorted(CASES.glob("*.py"))
        if path.stem not in ("conftest", "both_ways")
    ]
    command = [sys.executable, "-m", "pytest", f"--confcutdir={CASES}", "-q", *files]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout

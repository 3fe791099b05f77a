# SPDX-License-Identifier: Apache-2.0
"""Triton kernels in Triton's interpreter: engines draft the same with ours, and runner
V2's on a CPU do what vLLM's do.
"""

import pytest
import torch
from conftest import ROOT, full_but
from interpreter import run_cases

pytest.importorskip("triton")
ENGINES = ROOT / "tests" / "interpreted" / "test_kernels_in_engines.py"
RUNNER = ROOT / "tests" / "v2_kernels"
QUICK = "not early and not dynamo"


@pytest.mark.engine
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="run tests/interpreted there"
)
@pytest.mark.parametrize("cases", full_but({QUICK}, [QUICK, "early or dynamo"]))
def test_kernels_run_interpreted(cases: str) -> None:
    names = ("inputs", "outputs", "sampling", "tables")
    files = [RUNNER / f"{name}.py" for name in names]
    run_cases(ENGINES, *files, "-k", cases)

# SPDX-License-Identifier: Apache-2.0
"""Our kernels of runner V2 against vLLM's own, which run in Triton's interpreter.

The cases are tests/v2_kernels. They run in a process of their own, in which vLLM finds
Triton.
"""

import pytest
from conftest import ROOT
from interpreter import run_cases

CASES = ROOT / "tests" / "v2_kernels"

pytest.importorskip("triton")


def test_kernels_are_vllm_s() -> None:
    names = ("inputs", "outputs", "sampling", "tables")
    files = [CASES / f"{name}.py" for name in names]
    run_cases(f"--confcutdir={CASES}", *files)

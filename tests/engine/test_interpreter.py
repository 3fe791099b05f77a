# SPDX-License-Identifier: Apache-2.0
"""Engines draft the same where our Triton kernels run, in Triton's interpreter."""

import pytest
import torch
from conftest import ROOT
from interpreter import run_cases

pytest.importorskip("triton")


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="run tests/interpreted there")
def test_engines_run_the_kernels() -> None:
    run_cases(ROOT / "tests" / "interpreted" / "test_kernels_in_engines.py")

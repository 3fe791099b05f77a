# SPDX-License-Identifier: Apache-2.0
"""Engines draft the same where our Triton kernels run, in Triton's interpreter."""

import pytest
import torch
from conftest import ROOT, full_but
from interpreter import run_cases

pytest.importorskip("triton")


@pytest.mark.engine
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="run tests/interpreted there"
)
@pytest.mark.parametrize("method", full_but({"cp"}, ["cp", "early", "dynamo"]))
def test_engines_run_the_kernels(method: str) -> None:
    cases = ROOT / "tests" / "interpreted" / "test_kernels_in_engines.py"
    run_cases(cases, "-k", method)

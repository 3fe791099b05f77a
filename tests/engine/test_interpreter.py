# SPDX-License-Identifier: Apache-2.0
"""Drafting takes the Triton kernels where they may run, and drafts the same with them.

The checks are tests/interpreter_checks.py, in a process whose kernels run in Triton's
interpreter.
"""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, full_but

pytest.importorskip("triton")


def test_parts_draft_the_same() -> None:
    command = [sys.executable, str(ROOT / "tests" / "interpreter_checks.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert run.stdout.endswith("same\n"), run.stdout[-3000:] + run.stderr[-5000:]


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="run tests/interpreted there")
@pytest.mark.parametrize("method", full_but({"cp"}, ["cp", "early", "dynamo"]))
def test_engines_run_the_kernels(method: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        str(ROOT / "tests" / "interpreted" / "test_kernels_in_engines.py"),
        "-k",
        method,
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout

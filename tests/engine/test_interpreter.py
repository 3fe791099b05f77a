# SPDX-License-Identifier: Apache-2.0
"""Drafting takes the Triton kernels where they may run, and drafts the same with them.

The checks are tests/interpreter_checks.py, in a process whose kernels run in Triton's interpreter.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, Factory, runner_of

pytest.importorskip("triton")


def test_parts_draft_the_same() -> None:
    command = [sys.executable, str(ROOT / "tests" / "interpreter_checks.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.stdout.endswith("same\n"), run.stdout[-3000:] + run.stderr[-5000:]


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="run tests/interpreted there")
def test_engines_run_the_kernels() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "interpreted" / "test_kernels_in_engines.py")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


@pytest.mark.engine
def test_the_lm_head_is_read_as_a_matrix_where_vllm_multiplies_by_it(
    engine: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_ppd.vllm_plugins.engine.lm_head import TargetLMHead

    model = runner_of(engine()).model
    head = TargetLMHead(model)
    hidden = torch.randn(3, 64)
    plain = head.plain()
    assert plain is not None
    product = torch.nn.functional.linear(hidden, plain.weight, plain.bias)
    torch.testing.assert_close(product, head.logits(hidden, gather=False))
    for name, value in (("scale", 0.5), ("soft_cap", 30.0), ("logits_as_input", True), ("head_dtype", torch.float64)):
        with monkeypatch.context() as patch:
            patch.setattr(model.logits_processor, name, value)
            assert head.plain() is None, name
    quantised = SimpleNamespace(quant_method=object(), weight=plain.weight)
    with monkeypatch.context() as patch:
        patch.setattr(head, "lm_head", quantised)
        assert head.plain() is None

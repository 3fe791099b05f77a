# SPDX-License-Identifier: Apache-2.0
"""Drafting takes the Triton kernels where they may run, and drafts the same with them.

The checks are tests/interpreter_checks.py, in a process whose kernels run in Triton's interpreter.
"""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, Factory, runner_of

from vllm_ppd.kernels.dispatch import SWITCH

pytest.importorskip("triton")


def in_interpreter(*arguments: str, **environment: str) -> str:
    command = [sys.executable, str(ROOT / "tests" / "interpreter_checks.py"), *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1", **environment}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.stdout.endswith("same\n"), run.stdout[-3000:] + run.stderr[-5000:]
    return run.stdout


def test_parts_draft_the_same() -> None:
    in_interpreter("parts")


@pytest.mark.full
@pytest.mark.engine
def test_a_group_starts_the_same_candidates(tiny_model: Factory) -> None:
    results = []
    for switch in ("0", "always"):
        lines = in_interpreter("group", str(tiny_model()), **{SWITCH: switch}).splitlines()
        results.append(json.loads(next(line.removeprefix("RESULT ") for line in lines if line.startswith("RESULT "))))
    assert results[0] == results[1]
    assert min(results[0][1].values()) > 0


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

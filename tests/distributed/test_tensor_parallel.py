# SPDX-License-Identifier: Apache-2.0
"""Two ranks of tensor parallelism: the early head is vocabulary-parallel, the output is that of vLLM alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import CASES
from conftest import ROOT, Factory

pytestmark = [pytest.mark.engine, pytest.mark.ranks]

SCRIPT = """
import json, os, sys
sys.path.insert(0, {tests!r})
import conftest, cases
{patch}
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if len(os.sched_getaffinity(0)) > 1 else "nobind"
if __name__ == "__main__":
    llm = conftest.start_engine({model!r}, json.loads({options!r}), tensor_parallel_size=2)
    result = {{case: cases.CASES[case](llm) for case in {cases!r}}}
    accepted = conftest.counter(llm, "vllm:spec_decode_num_accepted_tokens")
    from prometheus_client import REGISTRY
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    steps = {{
        name: sum(sample.value for sample in samples if sample.name == f"ppd:{{name}}_total")
        for name in ("deferred_steps", "skipped_draft_layer_steps")
    }}
    print("RESULT", json.dumps([result, accepted, steps]))
"""

# Each rank's clock tells another cost of drafts, and all tell that drafts pay; nothing of it is kept.
CLOCKS = """
import random
from vllm_ppd.vllm_plugins.engine.v1 import warm_up
time_steps = warm_up.time_steps
def other_clock(*arguments):
    time_steps(*arguments)
    return [1 + 0.01 * count * random.random() for count in arguments[-1]]
warm_up.time_steps = other_clock
warm_up.MeasuredCosts.save = lambda costs, path: None
"""


def two_ranks(
    model: Path, options: dict[str, Any] | None, cases: list[str], patch: str = ""
) -> tuple[dict[str, Any], float, dict[str, float]]:
    """(What each case said, accepted drafts, steps by counter)."""
    script = SCRIPT.format(
        tests=str(ROOT / "tests"), model=str(model), options=json.dumps(options), cases=cases, patch=patch
    )
    path = Path(os.environ["PYTEST_TMP"]) / "two_ranks.py"
    path.write_text(script)
    run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=600)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, run.stdout[-3000:] + run.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_two_ranks(tiny_model: Factory, heads_folder: Factory, alone: Factory) -> None:
    """With heads and two exits over gamma, so that values, ids and probabilities are all exchanged."""
    options = {
        "method": "ppd",
        "model": str(heads_folder(exit_layers=(2, 4), noise=0.05)),
        "gamma": 0.03,
        "num_speculative_tokens": 3,
    }
    cases = ["batch_16", "arrivals_and_aborts"]
    got, accepted, steps = two_ranks(tiny_model(), options, cases)
    assert got == as_json({case: alone(case) for case in cases})
    assert accepted > 0
    assert steps["deferred_steps"] > 0


@pytest.mark.full
@pytest.mark.parametrize("lookup", [{}, {"prompt_lookup_min": 1, "prompt_lookup_drafts": 6}], ids=["", "lookup"])
def test_two_ranks_adaptive(tiny_model: Factory, alone: Factory, lookup: dict[str, Any]) -> None:
    """Two clocks, one choice: ranks that drafted differently would hang or say something else."""
    cases = ["batch_16", "more_than_fit", "arrivals_and_aborts"]
    options = {"method": "ppd", "exit_layer": 5, "adaptive": True, "step_costs": "measure", **lookup}
    got, _, steps = two_ranks(tiny_model(), options, cases, CLOCKS)
    assert got == as_json({case: alone(case) for case in cases})
    assert steps["deferred_steps"] > 0


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param("dynamo", {}, marks=pytest.mark.full),
        pytest.param("cp", {"rank": 3, "condition": "none"}, marks=pytest.mark.full),
        pytest.param("cp", {"rank": 2, "factorised": False, "condition": "none"}, marks=pytest.mark.full),
        pytest.param("cp", {"rank": 3, "condition": "chain"}, marks=pytest.mark.full),
        pytest.param("early", {"head": "classifier"}, marks=pytest.mark.full),
    ],
)
def test_two_ranks_with_heads(
    tiny_model: Factory, fitted_heads: Factory, alone: Factory, kind: str, how: dict[str, Any]
) -> None:
    """Each rank holds its part of the heads: layers and classifiers are sharded as the target's are."""
    options = {"model": fitted_heads(kind, **how), "num_speculative_tokens": 2}
    got, accepted, _ = two_ranks(tiny_model(), options, ["batch_16", "structured_output"])
    assert got == as_json({case: alone(case) for case in ("batch_16", "structured_output")})
    assert accepted > 0


@pytest.mark.full
def test_two_ranks_that_skip_the_draft_layers(tiny_model: Factory, fitted_heads: Factory, alone: Factory) -> None:
    """Both agree on which steps do, and on who drafts after them."""
    options = {"model": fitted_heads("dynamo"), "eps_b": 0.0, "disable_by_batch_size": 2}
    cases = ["crowd_that_ends", "batch_1"]
    got, accepted, steps = two_ranks(tiny_model(), options, cases)
    assert got == as_json({case: alone(case) for case in cases})
    assert accepted > 0
    assert steps["skipped_draft_layer_steps"] > 0


@pytest.mark.full
@pytest.mark.parametrize("options", [{"method": "ppd"}, {"method": "ppd", "draft_sample_method": "greedy"}])
def test_two_ranks_all_cases(tiny_model: Factory, options: dict[str, Any]) -> None:
    cases = list(CASES)
    expected, _, _ = two_ranks(tiny_model(), None, cases)
    got, accepted, _ = two_ranks(tiny_model(), options, cases)
    assert got == expected
    assert accepted > 0

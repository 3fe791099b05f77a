# SPDX-License-Identifier: Apache-2.0
"""Two ranks of tensor parallelism: heads are sharded as the target is, the output is
that of vLLM alone.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from cases import CASES
from conftest import ROOT, Factory, full_but

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
    counts = {{"accepted": conftest.counter(llm, "vllm:spec_decode_num_accepted_tokens")}}
    from prometheus_client import REGISTRY
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    deferred = "ppd:deferred_steps_total"
    counts["deferred_steps"] = sum(sample.value for sample in samples if sample.name == deferred)
    print("RESULT", json.dumps([result, counts]))
"""

# Each rank's clock tells another cost of drafts, and all tell that drafts pay; nothing
# of it is kept.
CLOCKS = """
import random
from vllm_ppd.vllm_plugins.draft_length.costs import MeasuredCosts
from vllm_ppd.vllm_plugins.engine import worker
time_steps = worker.time_steps
def other_clock(*arguments):
    time_steps(*arguments)
    return [1 + 0.01 * count * random.random() for count in arguments[-1]]
worker.time_steps = other_clock
MeasuredCosts.save = lambda costs, path: None
"""


def two_ranks(
    folder: Path,
    model: Path,
    options: dict[str, Any] | None,
    cases: Iterable[str],
    patch: str = "",
) -> tuple[dict[str, Any], dict[str, float]]:
    """(What each case said; accepted drafts, and steps by counter); the script that
    they run is put into the folder.
    """
    script = SCRIPT.format(
        tests=str(ROOT / "tests"),
        model=str(model),
        options=json.dumps(options),
        cases=list(cases),
        patch=patch,
    )
    path = folder / "two_ranks.py"
    path.write_text(script)
    run = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=600
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, run.stdout[-3000:] + run.stderr[-3000:]
    said, counts = json.loads(lines[0].removeprefix("RESULT "))
    return said, counts


# Each rank holds its part of the heads.
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamo": ("dynamo", {}),
    "cp": ("cp", {"rank": 3, "condition": "none"}),
    "cp, whole classifiers": (
        "cp",
        {"rank": 2, "factorised": False, "condition": "none"},
    ),
    "cp, recurrent": (
        "cp",
        {"rank": 3, "condition": "recurrent", "expert_rank": 4, "layers": (1, 3)},
    ),
    "early": ("hand-made", {"exit_layers": (4,), "noise": 0.05}),
    "early, classifiers": ("early", {"head": "classifier"}),
    "recurrent": ("recurrent", {"tie_weights": False}),
}
# With gamma, values, token IDs and probabilities are all exchanged.
OPTIONS: dict[str, dict[str, Any]] = {
    "early": {"gamma": 0.03},
    "dynamo": {"eps_b": 0.0},
}


@pytest.mark.parametrize("name", full_but({"early"}, HEADS))
def test_two_ranks(
    tiny_model: Factory, with_heads: Factory, alone: Factory, tmp_path: Path, name: str
) -> None:
    cases = ("batch_16", "structured_output", "arrivals_and_aborts")
    options = {
        "num_speculative_tokens": 2,
        "heads": HEADS[name],
        **OPTIONS.get(name, {}),
    }
    said, counts = two_ranks(tmp_path, tiny_model(), with_heads(options), cases)
    assert said == as_json({case: alone(case) for case in cases})
    assert counts["accepted"] > 0
    assert (counts["deferred_steps"] > 0) == name.startswith("early")


@pytest.mark.full
@pytest.mark.parametrize("lookup", [{}, {"prompt_lookup_min": 1}], ids=["", "lookup"])
def test_two_ranks_adaptive(
    tiny_model: Factory, alone: Factory, tmp_path: Path, lookup: dict[str, Any]
) -> None:
    """Two clocks, one choice: ranks that drafted differently would hang or say something else."""
    cases = ("batch_16", "more_than_fit", "arrivals_and_aborts")
    options = {
        "method": "ppd",
        "exit_layer": 5,
        "adaptive": True,
        "step_costs": "measure",
        **lookup,
    }
    said, counts = two_ranks(tmp_path, tiny_model(), options, cases, CLOCKS)
    assert said == as_json({case: alone(case) for case in cases})
    assert counts["deferred_steps"] > 0


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"method": "ppd", "exit_layer": 3},
        {"method": "ppd", "exit_layer": 3, "draft_sample_method": "greedy"},
    ],
)
def test_two_ranks_all_cases(
    tiny_model: Factory, tmp_path: Path, options: dict[str, Any]
) -> None:
    expected, _ = two_ranks(tmp_path, tiny_model(), None, CASES)
    said, counts = two_ranks(tmp_path, tiny_model(), options, CASES)
    assert said == expected and counts["accepted"] > 0


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))

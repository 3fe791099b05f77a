# SPDX-License-Identifier: Apache-2.0
"""Times of kernels, rehearsed on the CPU, and the calls that a step makes."""

import json
from pathlib import Path

import pytest

from vllm_ppd.benchmarks.gpu import kernels
from vllm_ppd.benchmarks.gpu.steps import by_kind


def test_every_kernel_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "kernels.json"
    monkeypatch.setattr("sys.argv", ["kernels", "--cpu", "--out", str(out)])
    kernels.main()
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 4 * 2
    assert all(
        row["torch"] > 0 and row["verdict"] == "not measured" for row in rows
    )


def test_calls_of_a_step_are_counted_by_kind() -> None:
    """Copies that do not wait are copies; what ran beyond the launches was in graphs."""
    calls = {
        "cudaLaunchKernel": 30,
        "cuLaunchKernelEx": 12,
        "cudaGraphLaunch": 4,
        "cudaEventSynchronize": 2,
        "cudaMemcpy": 1,
        "cudaMemcpyAsync": 9,
        "cudaStreamSynchronize": 2,
        "cudaMemsetAsync": 3,
        "_rejection_kernel": 90,
    }
    calls["aten::mm"] = 70
    assert by_kind(calls) == {
        "launches": 42,
        "copies": 9,
        "graphs": 4,
        "nodes": 39,
        "waits": 5,
    }

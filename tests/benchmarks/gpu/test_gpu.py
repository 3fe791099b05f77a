# SPDX-License-Identifier: Apache-2.0
"""Times of kernels, rehearsed on the CPU, and the calls that a step makes."""

import json
from collections import Counter
from pathlib import Path

import pytest

from vllm_ppd.benchmarks.gpu import kernels
from vllm_ppd.benchmarks.gpu.calls import by_kind
from vllm_ppd.heads.locking import writing_file


@pytest.mark.parametrize(
    ("triton", "expected"), [(8, "pays: 80% of torch's time"), (9, "does not pay: 90% of torch's time")]
)
def test_the_rule_of_80_percent(triton: float, expected: str) -> None:
    assert kernels.verdict(10.0, triton) == expected


def test_every_kernel_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "kernels.json"
    monkeypatch.setattr("sys.argv", ["kernels", "--cpu", "--out", str(out)])
    kernels.main()
    written = json.loads(out.read_text())
    assert {"command", "time", "git", "versions", "machine", "settings"} <= written.keys()
    assert len(written["rows"]) == 7 * 2
    for row in written["rows"]:
        assert row["torch"] > 0 and row["verdict"] == "not measured"


def test_a_file_that_another_process_writes_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "kernels.json"
    monkeypatch.setattr("sys.argv", ["kernels", "--cpu", "--out", str(out)])
    with writing_file(out), pytest.raises(SystemExit, match="is being written by another process"):
        kernels.main()
    assert not out.exists()


def test_calls_of_a_step_are_counted_by_kind() -> None:
    """Names as CUPTI gives them; copies that do not wait are copies, and what ran beyond the launches was in graphs."""
    calls = Counter({"cudaLaunchKernel": 30, "cuLaunchKernelEx": 12, "cudaGraphLaunch": 4, "cudaEventSynchronize": 2})
    calls += Counter({"cudaMemcpy": 1, "cudaMemcpyAsync": 9, "cudaStreamSynchronize": 2, "_rejection_kernel": 90})
    calls += Counter({"aten::mm": 70, "cudaMemsetAsync": 3})
    assert by_kind(calls) == {"launches": 42, "copies": 9, "graphs": 4, "nodes": 39, "waits": 5}

# SPDX-License-Identifier: Apache-2.0
"""Times of kernels, rehearsed on the CPU."""

import json
from pathlib import Path

import pytest

from vllm_ppd.benchmarks.gpu import kernels


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

# SPDX-License-Identifier: Apache-2.0
"""The GPU runbook in its CPU mode: it runs to the end, and a killed run goes on where it was."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ppd.benchmarks.decode.options import DecodeOptions
from vllm_ppd.benchmarks.gpu import run
from vllm_ppd.benchmarks.gpu.kernels import verdict
from vllm_ppd.vllm_plugins.cli.arguments import options_from
from vllm_ppd.vllm_plugins.cli.main import make_parser

KERNELS, RUN = (["-m", f"vllm_ppd.benchmarks.gpu.{name}"] for name in ("kernels", "run"))
CASES = 8 * 2  # kernels and variants at each of the CPU mode's two batch sizes


@pytest.mark.parametrize(
    ("triton", "floor", "expected"),
    [
        (10, 9, "kept: 90% of the floor, 100% of torch's time"),
        (11, 9, "does not pay: 82% of the floor, 110% of torch's time"),
        (9, 1, "does not pay: 11% of the floor, 90% of torch's time"),
        (8, 1, "kept: 12% of the floor, 80% of torch's time"),
    ],
)
def test_the_rule_of_80_percent(triton: float, floor: float, expected: str) -> None:
    row = {"reference_us": 10.0, "triton_us": float(triton), "triton_share_of_floor": floor / triton}
    assert verdict(row) == expected


@pytest.mark.parametrize("gib", [24, 40, 80, 141])
def test_the_kv_cache_holds_the_largest_batch(gib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside two engines' weights, with the bytes that a token takes in so many layers."""
    properties = SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    args = argparse.Namespace(out=tmp_path, cpu=False, tests=None, bandwidth=None, peak=None)
    shape = run.write_model(tmp_path / "model", cpu=False)
    *others, decode, kernels = run.parts(args, shape)
    assert kernels.name == "kernel times" and others[0].name == "tests: v2_exactness"
    assert dict(others[0].environment) == {"PPD_TEST_V2": "1"}
    said = [word for word in decode.command if word.startswith("ppd, ")]
    assert [word.partition("=")[0] for word in said] == ["ppd, every draft", "ppd, runner V1", "ppd, synchronous"]
    options = options_from(DecodeOptions, make_parser().parse_args(decode.command[3:]))
    token = 2 * 2 * 8 * 128 * shape["num_hidden_layers"]  # keys and values in bfloat16
    needed = max(options.batch_sizes) * options.engine_arguments["max_model_len"]
    cache = options.engine_arguments["kv_cache_memory_bytes"]
    assert cache > 1.1 * needed * token
    assert 2 * (run.SHARE * (gib << 30) + cache) < 0.9 * (gib << 30) or gib < 80
    assert "tests: exactness" in [part.name for part in others]
    assert all(Path(part.command[-1]).exists() for part in others if part.name.startswith("tests: "))
    assert "tests: tensor_parallel" not in [part.name for part in others]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "tests: tensor_parallel" in [part.name for part in run.parts(args, shape)]


def entries(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["entries"] if path.exists() else {}


def test_a_killed_measurement_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    command = [sys.executable, *KERNELS, "--cpu", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while len(entries(out)) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.wait()
    before = entries(out)
    assert len(before) >= 3
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = entries(out)
    assert len(after) == CASES + 1
    assert {name: after[name] for name in before} == before
    assert {entry["run"] for name, entry in after.items() if name not in before} <= {1}
    measured = [entry for name, entry in after.items() if name != "machine"]
    assert all(entry["floor_us"] > 0 and entry["verdict"].startswith("not measured") for entry in measured)
    refused = subprocess.run([*command, "--rank", "2"], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "holds results of other settings (rank); give another --out" in refused.stderr


def test_the_runbook_repeats_what_failed(tmp_path: Path) -> None:
    out = tmp_path / "gpu"
    out.mkdir()
    # An unreadable file of kernel times makes that part fail; its removal mends it.
    (out / "kernels.json").write_text("{}")
    command = [sys.executable, *RUN, "--cpu", "--out", str(out), "--skip", "decode", "--tests"]
    first = subprocess.run(command, capture_output=True, text=True)
    assert first.returncode == 1, first.stderr
    made = entries(out / "results.json")
    assert made["kernel times"]["status"].startswith("failed")
    assert "KeyError" in made["kernel times"]["end"][-1]
    (out / "kernels.json").unlink()
    second = subprocess.run(command, capture_output=True, text=True)
    again = entries(out / "results.json")
    assert again["kernel times"]["status"] == "passed", second.stdout
    assert len(again["kernel times"]["result"]["entries"]) == CASES + 1
    runs = json.loads((out / "results.json").read_text())["runs"]
    assert len(runs) == 2
    assert {"command", "time", "git", "versions", "machine"} <= set(runs[0])

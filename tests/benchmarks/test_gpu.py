# SPDX-License-Identifier: Apache-2.0
"""The GPU runbook in its CPU mode: it runs to the end, and a killed run goes on where it was."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ppd.benchmarks.decode.options import DecodeOptions
from vllm_ppd.benchmarks.gpu import kit, run
from vllm_ppd.benchmarks.gpu.kernels import verdict
from vllm_ppd.benchmarks.gpu.steps import per_step
from vllm_ppd.benchmarks.harness.contenders import contenders
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
    """Beside the weights of all that are alive, with the bytes that a token takes in so many layers."""
    properties = SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    args = argparse.Namespace(out=tmp_path, cpu=False, tests=None, bandwidth=None, peak=None)
    shape = run.write_model(tmp_path / "model", cpu=False)
    found = run.parts(args, shape)
    *others, decode, kernels = found
    assert all(part.name.startswith("tests: ") for part in others)
    assert (decode.name, kernels.name) == ("decode", "kernel times") and others[0].name == "tests: v2_exactness"
    assert dict(others[0].environment) == {"PPD_TEST_V2": "1"}
    options = options_from(DecodeOptions, make_parser().parse_args(decode.command[3:]))
    names = ["ngram", "ppd, every draft", "ppd, synchronous", "ppd, runner V1", "vLLM, runner V1"]
    assert [one.name for one in contenders(options)][2:] == names
    token = 2 * 2 * 8 * 128 * shape["num_hidden_layers"]  # keys and values in bfloat16
    needed = max(options.batch_sizes) * options.engine_arguments["max_model_len"]
    cache = options.engine_arguments["kv_cache_memory_bytes"]
    assert cache > 1.1 * needed * token
    assert options.together and options.alive * (run.SHARE * (gib << 30) + cache) < 0.85 * (gib << 30)
    assert [part.command[-1] for part in others if "exactness" in part.name][1:] == list(run.SPLIT["exactness"])
    assert all(Path(part.command[6]).exists() for part in others)
    assert "tests: tensor_parallel" not in [part.name for part in others]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "tests: tensor_parallel" in [part.name for part in run.parts(args, shape)]


def test_a_kit_has_our_wheel_and_what_it_requires(tmp_path: Path) -> None:
    own, others = kit.commands(tmp_path, "3.12", "0.33.0")
    assert own[-2:] == [str(tmp_path), str(run.ROOT)]
    assert others[-2:] == ["vllm==0.33.0", "vllm-ppd[dev]"] and "3.12" in others
    assert "manylinux_2_28_x86_64" in others  # as vLLM's and torch's wheels have it
    names = ["torch-2.13.0-cp312.whl", "nvidia_cublas-13.1-py3.whl", "numpy-2.4.0-cp312.whl", "torchvision-0.28.whl"]
    assert kit.left_out(names, ["torch", "nvidia-*"]) == names[:2]


def test_a_part_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    """With what it started; the runbook goes on, and repeats it when it is run again."""
    child = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    record = run.run_part(run.Part("slow", [sys.executable, "-c", child]), tmp_path / "log", 5)
    assert record["status"] == "stopped after 5 s" and record["seconds"] < 60
    pid = int((tmp_path / "log").read_text())
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


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


def test_calls_of_a_step_are_counted_by_kind() -> None:
    """Names as CUPTI gives them; copies that do not wait, and kernels' own names, are neither."""
    calls = Counter({"cudaLaunchKernel": 30, "cuLaunchKernelEx": 12, "cudaGraphLaunch": 4, "cudaEventSynchronize": 2})
    calls += Counter({"cudaMemcpy": 1, "cudaMemcpyAsync": 9, "cudaStreamSynchronize": 2, "_rejection_kernel": 5})
    assert per_step(calls, 2) == {"launches": 21.0, "graphs": 2.0, "waits": 2.5}

# SPDX-License-Identifier: Apache-2.0
"""`ppd train --ray-workers` on a Ray of this machine: two workers, a core each, as over several machines."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from conftest import Factory, patterned_texts, write_texts
from safetensors.torch import load_file

from vllm_ppd.vllm_plugins.cli.main import main

pytestmark = [pytest.mark.ranks, pytest.mark.full]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


@pytest.fixture
def command(tiny_model: Factory, tmp_path: Path) -> list[str]:
    data = write_texts(tmp_path / "data.jsonl", patterned_texts(60, 6))
    return [
        "train", "early", "--model", str(tiny_model()), "--data", str(data), "--steps", "6", "--batch-size", "4",
        "--sequence-length", "64", "--precision", "float32", "--stored-dtype", "float32", "--device", "cpu",
        "--held-out", "0.1",
    ]  # fmt: skip


def test_ray_trains_the_heads_that_torchrun_does(cluster: None, command: list[str], tmp_path: Path) -> None:
    """Bit for bit: the same halves of every batch in as many processes (training/test_loop.py holds these to one)."""
    over_ray, over_torchrun = tmp_path / "ray", tmp_path / "torchrun"
    assert main([*command, "--out", str(over_ray), "--ray-workers", "2"]) == 0
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "vllm_ppd.vllm_plugins.cli.main"]
    subprocess.run([sys.executable, *launch, *command, "--out", str(over_torchrun)], check=True, cwd=tmp_path)
    heads, expected = (load_file(folder / "model.safetensors") for folder in (over_ray, over_torchrun))
    assert heads.keys() == expected.keys()
    assert all(torch.equal(heads[name], tensor) for name, tensor in expected.items())


def test_what_a_worker_refuses_is_a_single_line(
    cluster: None, command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--batch-size", "3", "--out", str(tmp_path / "out"), "--ray-workers", "2"]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error == "ppd: error: --batch-size 3 is not divisible by 2 processes x 1 accumulated parts"

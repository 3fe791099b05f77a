# SPDX-License-Identifier: Apache-2.0
"""`make inflated` and `make bytes`, as make would run them: every step, in order, once; a stopped run goes on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

from vllm_ppd.vllm_plugins.cli.main import make_parser

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

KINDS, PEERS = ("early", "cp", "dynamo"), ("eagle", "medusa")
# What each step writes last.
RESULTS = [
    "corpus/validation.jsonl",
    "bytes/model/provenance.json",
    *(f"bytes/heads/{kind}/{name}" for kind in KINDS for name in ("provenance.json", ".calibrated")),
    *(f"bytes/peers/{peer}/provenance.json" for peer in PEERS),
    *(f"bytes/inflated/heads/{kind}/{name}" for kind in KINDS for name in ("provenance.json", ".calibrated")),
    *(f"bytes/inflated/peers/{peer}/config.json" for peer in PEERS),
]


def steps(folder: Path, target: str) -> list[str]:
    """The script or command, and the folder that it writes or is about, of each step that make would do."""
    command = ["make", "-n", target, f"BUILD={folder}"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.replace("\\\n", " ")
    found = []
    for line in said.splitlines():
        words = line.split()
        if "/ppd " in line:
            args = vars(make_parser().parse_args(words[1:]))  # ends the test where the command is none
            found.append((words[1], args["folder"] if "folder" in args else args["out"]))
        elif "benchmarks/" in line:
            found.append((Path(words[1]).name, words[-1]))
    return [f"{name} {Path(place).relative_to(folder)}" for name, place in found]


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_inflated_is_made_in_order(tmp_path: Path) -> None:
    found = steps(tmp_path, "inflated")
    assert sorted(found) == sorted([
        "corpus.py corpus", "inflate.py inflated100", "inflate.py inflated",
        "eagle.py peers/eagle", "medusa.py peers/medusa", "draft_model.py peers/draft_model",
        *["inflate_peers.py inflated/peers"] * 3, *(f"calibrate inflated/heads/{kind}" for kind in KINDS),
    ])  # fmt: skip
    grown = [place for place, step in enumerate(found) if step.startswith("inflate_peers")]
    trained = [found.index(f"{peer}.py peers/{peer}") for peer in ("eagle", "medusa", "draft_model")]
    assert found.index("inflate.py inflated") < grown[0]
    assert all(own < place for own, place in zip(trained, grown, strict=True))
    make(
        tmp_path,
        "corpus/validation.jsonl",
        "inflated/peers/medusa/config.json",
        "inflated/peers/draft_model/config.json",
    )
    make(tmp_path, *(f"{name}/heads/dynamo/provenance.json" for name in ("inflated", "inflated100")))
    make(tmp_path, *(f"peers/{peer}/provenance.json" for peer in ("eagle", "medusa", "draft_model")))
    make(tmp_path, *(f"inflated/heads/{kind}/.calibrated" for kind in ("early", "cp")))
    assert steps(tmp_path, "inflated") == ["inflate_peers.py inflated/peers", "calibrate inflated/heads/dynamo"]


def test_every_step_of_bytes_in_order(tmp_path: Path) -> None:
    found = steps(tmp_path, "bytes")
    assert len(found) == 2 + 3 + 3 + 2 + 1 + 2 + 3
    assert found.count("inflate_peers.py bytes/inflated/peers") == 2
    assert len(set(found)) == len(found) - 1  # nothing else twice
    assert found[:2] == ["corpus.py corpus", "train.py bytes/model"]
    inflated = found.index("inflate.py bytes/heads/dynamo")
    small = [f"{what} bytes/heads/{kind}" for kind in KINDS for what in ("train", "calibrate")]
    assert [step for step in found[:inflated] if "heads" in step] == small
    assert found[-3:] == [f"calibrate bytes/inflated/heads/{kind}" for kind in KINDS]


def test_a_stopped_run_of_bytes_goes_on(tmp_path: Path) -> None:
    make(tmp_path, *RESULTS)
    assert steps(tmp_path, "bytes") == []
    make(tmp_path, "corpus/validation.jsonl")  # newer than what was made of it
    assert steps(tmp_path, "bytes") == []
    (tmp_path / "bytes/heads/cp/.calibrated").unlink()
    (tmp_path / "bytes/inflated/heads/cp/.calibrated").unlink()
    assert steps(tmp_path, "bytes") == ["calibrate bytes/heads/cp", "calibrate bytes/inflated/heads/cp"]

# SPDX-License-Identifier: Apache-2.0
"""`make inflated` and `make bytes`: every step, in order, once; a stopped run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT

from vllm_ppd.benchmarks.models.make_models import Step, main, steps
from vllm_ppd.heads.locking import writing_file, writing_folder
from vllm_ppd.heads.quote import place
from vllm_ppd.vllm_plugins.cli.main import make_parser

KINDS = ("early", "cp", "dynamo")


def left(folder: Path, target: str) -> list[str]:
    """The script or command, and what it writes last, of each step that is not done."""
    found = []
    for step in steps(target, folder):
        *_, name = step.words[2].split(".")
        if name == "main":
            make_parser().parse_args(step.words[3:])  # ends the test where the command is none
            name = step.words[3]
        elif name != "main":
            assert find_spec(step.words[2]) is not None
        found += [] if step.done else [f"{name} {step.result.relative_to(folder)}"]
    return found


def test_inflated_is_made_in_order(tmp_path: Path) -> None:
    found = left(tmp_path, "inflated")
    assert found[:3] == [
        "corpus corpus/validation.jsonl", "inflate inflated100/heads/dynamo/provenance.json",
        "inflate inflated/heads/dynamo/provenance.json",
    ]  # fmt: skip
    peers = [
        (f"train peers/{peer}/provenance.json", f"inflate inflated/peers/{peer}/config.json")
        for peer in ("eagle", "medusa", "draft_model")
    ]
    assert found[3:9] == [name for pair in peers for name in pair]
    assert found[9:] == [f"calibrate inflated/heads/{kind}/.calibrated" for kind in KINDS]


def test_bytes_are_made_in_order_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    found = left(tmp_path, "bytes")
    assert len(found) == len(set(found)) == 2 + 3 + 3 + 1 + 2 + 2 + 3
    assert found[:2] == ["corpus corpus/validation.jsonl", "train bytes/model/provenance.json"]
    small = [f"{what} bytes/heads/{kind}/{last}" for kind in KINDS
             for what, last in (("train", "provenance.json"), ("calibrate", ".calibrated"))]  # fmt: skip
    assert found[2:8] == small
    assert found[8] == "inflate bytes/inflated/heads/dynamo/provenance.json"
    for step in steps("bytes", tmp_path):
        step.result.parent.mkdir(parents=True, exist_ok=True)
        step.result.touch()
    assert left(tmp_path, "bytes") == []
    (tmp_path / "bytes/heads/cp/.calibrated").unlink()
    assert left(tmp_path, "bytes") == ["calibrate bytes/heads/cp/.calibrated"]


def test_steps_run_and_a_failure_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    python = [sys.executable, "-c"]
    made, marked = tmp_path / "made", tmp_path / "marked"
    todo = [
        Step(made, [*python, f"open({str(made)!r}, 'w')"]), Step(marked, [*python, "pass"], mark=True),
        Step(tmp_path / "never", [*python, "raise SystemExit(3)"]),
    ]  # fmt: skip
    monkeypatch.setattr("vllm_ppd.benchmarks.models.make_models.steps", lambda *_: todo)
    monkeypatch.setattr(sys, "argv", ["make_models", "bytes", "--out", str(tmp_path), "--list"])
    main()
    assert not made.exists() and len(capfd.readouterr().out.splitlines()) == 3
    monkeypatch.setattr(sys, "argv", ["make_models", "bytes", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="ended with code 3; the same command goes on there"):
        main()
    assert made.exists() and marked.exists()


def test_make_calls_the_script() -> None:
    said = subprocess.run(["make", "-n", "bytes"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-m vllm_ppd.benchmarks.models.make_models bytes --out build" in said


@pytest.mark.parametrize(
    "script",
    [
        ("models.make_models", "inflated"),
        ("models.corpus",),
        ("models.train",),
        ("models.inflate", "--model", "any", "--factor", "2"),
        ("models.peers.train", "eagle"),
        ("models.recipes", "--model", "any", "--data", "any"),
        ("gpu.kernels", "--cpu"),
    ],
    ids=lambda script: script[0],
)
def test_scripts_leave_alone_what_another_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: tuple[str, ...]
) -> None:
    name, *words = script
    monkeypatch.setattr(sys, "argv", [name, *words, "--out", str(tmp_path)])
    with writing_folder(tmp_path), writing_file(tmp_path), pytest.raises(SystemExit) as ended:
        import_module(f"vllm_ppd.benchmarks.{name}").main()
    told = f"{ended.value} {capsys.readouterr().err}"
    assert f"{place(tmp_path)} is being written by process {os.getpid()} (" in told
    assert not list(tmp_path.iterdir())

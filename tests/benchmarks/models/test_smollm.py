# SPDX-License-Identifier: Apache-2.0
"""`make smollm` and `make serve MODEL=smollm`: heads are those of the model."""

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

from vllm_ppd.benchmarks.models import smollm
from vllm_ppd.heads.io import load_config
from vllm_ppd.heads.target import fingerprint


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
def test_the_model_is_made_once(tmp_path: Path) -> None:
    """Downloads 93 MB; heads of this repository belong to what comes out."""
    for _ in range(2):
        assert smollm.run(smollm.SmolLMOptions(out=str(tmp_path))) == 0
    made = fingerprint(tmp_path / "model")
    expected = load_config(ROOT / "benchmarks" / "smollm" / "heads" / "cp").fingerprint
    assert not expected.difference(made) and not expected.other_weights(made)

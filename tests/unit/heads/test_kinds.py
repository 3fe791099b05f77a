# SPDX-License-Identifier: Apache-2.0
"""docs/adding-a-kind-of-heads.md: its fifth kind is trained, described, calibrated and
planned with.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Factory, patterned_texts, write_texts

import vllm_ppd.heads
from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.vllm_plugins.cli.main import main


@pytest.fixture
def shift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's folder, beside those of the other kinds, and its line."""
    page = (ROOT / "docs" / "adding-a-kind-of-heads.md").read_text()
    folder = tmp_path / "heads" / "shift"
    folder.mkdir(parents=True)
    for name, code in re.findall(r"```python (\w+\.py)\n(.*?)```", page, re.S):
        (folder / name).write_text(code)
    assert len(list(folder.iterdir())) == 3
    (line,) = re.findall(r"```python\n(.*?)\n```", page, re.S)
    monkeypatch.setattr(
        vllm_ppd.heads, "__path__", [*vllm_ppd.heads.__path__, str(folder.parent)]
    )
    exec(line, {})
    yield
    KINDS.pop("shift")
    for name in list(sys.modules):
        if name.startswith("vllm_ppd.heads.shift"):
            del sys.modules[name]


def test_a_fifth_kind_is_a_folder_and_a_line(
    shift: None,
    tiny_model: Factory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write_texts(tmp_path / "data.jsonl", patterned_texts(30, 30))
    heads = tmp_path / "trained"
    shared = f"--data {data} --device cpu"
    train = f"train shift --model {tiny_model()} --out {heads} {shared} --steps 2"
    sizes = "--batch-size 2 --sequence-length 64 --dtype float32"
    assert main([*train.split(), *sizes.split()]) == 0
    sizes = "--num-prompts 4 --prompt-tokens 8 --output-len 8"
    assert main(f"calibrate {heads} {shared} {sizes}".split()) == 0
    assert main(["inspect", str(heads)]) == 0
    shown = capsys.readouterr().out
    for words in ("shift", "will load: yes", "calibrated ", "redicted"):
        assert words in shown, words
    assert "a shift of the hidden state" in (heads / "README.md").read_text()
    config = json.loads((heads / "config.json").read_text())
    assert config["speculators_model_type"] == "shift"

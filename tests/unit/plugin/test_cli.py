# SPDX-License-Identifier: Apache-2.0
"""`ppd`: commands and flags from the options' models, what `inspect` prints, and how errors end."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO, Factory

from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.vllm_plugins.cli.main import main


@pytest.mark.parametrize("kind", KINDS)
def test_flags_are_the_fields(kind: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["train", kind, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: ppd train {kind} --model MODEL --data FILE --out OUT [options]\n")
    for name in KINDS[kind].options.model_fields:
        assert "--" + name.replace("_", "-") in text


def test_help_shows_defaults_of_zero_and_what_lists_take(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "decode", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "seed of the engines (default 0)" in text
    assert "(default False)" not in text and "(default ())" not in text and "(default None)" not in text
    for flag in ("--data FILE", "--heads FOLDER", "--also NAME={JSON}"):
        assert f"{flag} [" in text


def test_inspect_says_whether_heads_load(tiny_model: Factory, capsys: Any) -> None:
    folder = str(DEMO.parent / "heads" / "early")
    assert main(["inspect", folder]) == 0
    text = capsys.readouterr().out
    assert "early (EarlyHeads)" in text
    assert re.search(r"will load: yes, with \S+", text)
    for flag in ("--target", "--model"):
        assert main(["inspect", folder, flag, str(tiny_model("qwen2"))]) == 2
        assert "hidden_size is" in capsys.readouterr().err
    assert main(["inspect", folder, "--target", folder + "/.."]) == 2
    assert "the folder has no config.json; give the folder of a model" in capsys.readouterr().err
    assert main(["inspect", folder, "--target", "/nowhere"]) == 0
    out = capsys.readouterr().out
    assert "will load: not known: " in out and "'/nowhere', which is not on this disk\n" in out
    assert main(["inspect", "/nowhere"]) == 2


@pytest.mark.parametrize("command", ["train", "data", "fit", "calibrate", "states cache"])
def test_what_cannot_be_written_is_named(
    tiny_model: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, command: str
) -> None:
    """In one line, before any work is done: a path below a file, and a folder that is read-only."""
    (tmp_path / "file").write_text("")
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "some text, which is long enough for a window"}\n' * 20)
    model, out = str(tiny_model()), str(tmp_path / "file" / "out.jsonl")
    train = ["train", "early", "--model", model, "--data", str(data), "--sequence-length", "8", "--device", "cpu"]
    words = {
        "train": [*train, "--out", out],
        "data": ["data", "--model", model, "--prompts", str(data), "--out", out],
        "fit": ["fit", model, "--prompts", str(data), "--out", out],
        "calibrate": ["calibrate", str(DEMO.parent / "heads" / "early"), "--data", str(data), "--prompts", "1"],
        "states cache": [*train, "--out", str(tmp_path / "heads"), "--states-cache", out],
    }[command]
    reason = "Not a directory|File exists"
    if command == "calibrate":
        opened, reason = os.open, "Read-only file system"

        def read_only(path: Any, flags: int, *more: Any, **named: Any) -> int:
            if flags & os.O_CREAT:
                raise OSError(errno.EROFS, reason, path)
            return opened(path, flags, *more, **named)

        monkeypatch.setattr(os, "open", read_only)
    assert main(words) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(reason, line) and "Errno" not in line
    assert re.search("cannot be (read or )?written", line) and "or give another" in line
    assert ("demo/heads/early" if command == "calibrate" else "file/out.jsonl") in line

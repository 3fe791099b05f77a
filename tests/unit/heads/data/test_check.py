# SPDX-License-Identifier: Apache-2.0
"""Data are looked at before a model is loaded: bad ones end every command with one line that names the file."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO
from records import write

from vllm_ppd.heads.data.check import check_data
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.training.provenance import data_files, trained_on
from vllm_ppd.vllm_plugins.cli.main import main

HEADS = DEMO.parent / "heads" / "early"
GOOD = {"prompt_token_ids": [4, 5, 6, 7]}
MODEL = ["--model", str(DEMO), "--out", "out"]
COMMANDS = {
    "train": ["train", "early", *MODEL, "--data"],
    "calibrate": ["calibrate", str(HEADS), "--prompts", "2", "--data"],
    "data": ["data", *MODEL, "--prompts"],
    "decode": ["bench", "decode", *MODEL, "--data"],
    "serve": ["bench", "serve", *MODEL, "--data"],
    "acceptance": ["bench", "acceptance", *MODEL, "--data"],
}
BAD: dict[str, tuple[str, str | None, str]] = {
    "no file": ("none.jsonl", None, "data file 'none.jsonl' does not exist"),
    "a pipe": ("pipe", None, "data file 'pipe' is not a regular file"),
    "an empty file": ("a.jsonl", "", "data file 'a.jsonl' is empty; give .jsonl, .json or text files with text"),
    "an empty text": ("a.txt", "", "data file 'a.txt' is empty; give .jsonl"),
    "blank lines": ("a.jsonl", "\n \n", "data file 'a.jsonl' is empty; give .jsonl"),
    "no text in it": ("a.jsonl", '{"text": null}\n' * 3, "a.jsonl holds no text (a.jsonl:1: the text is null); give"),
    "no JSON": ("a.jsonl", '{"text": "a"}\n{', "a.jsonl:2 is not JSON"),
    "no form": ("a.json", '[{"text": "a"},\n{"txt": "a"}]', "a.json, record 2 has 'txt'; each record needs 'text'"),
    "a bad chat": ("a.jsonl", '{"messages": [{"role": "user"}]}\n', "a.jsonl:1: 'messages' must be a list"),
}


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever loads a model or a tokenizer, or starts an engine, fails the test."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded")

    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(f"transformers.{name}.from_pretrained", load)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("command", COMMANDS)
def test_bad_data_are_one_line_before_a_model_is_loaded(
    command: str, bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, content, message = BAD[bad]
    if content is not None:
        Path(name).write_text(content)
    elif bad == "a pipe":
        os.mkfifo(name)
    assert main([*COMMANDS[command], name]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(f"ppd: error: {message}") and len(line) <= 320 and not printed.out
    assert not Path("out").exists()


def test_an_empty_file_beside_others_is_named() -> None:
    with pytest.raises(TrainingError, match=r"data file 'b\.jsonl' is empty"):
        check_data([write("a.jsonl", GOOD), write("b.jsonl")])


def test_empty_files_of_a_folder_are_no_fault_unless_all_are() -> None:
    Path("folder").mkdir()
    for name in ("a.jsonl", "b.txt"):
        write(f"folder/{name}")
    with pytest.raises(TrainingError, match="none of 2 data files holds text; give"):
        check_data(["folder"])
    write("folder/c.jsonl", GOOD)
    check_data(["folder"])


def test_too_few_prompts_are_told_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    data = write("a.jsonl", GOOD, {"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]})
    assert main(["calibrate", str(HEADS), "--data", data]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a.jsonl holds 3 prompts, but 64 are needed; give more data, or smaller --prompts" in line
    write("b.jsonl", {"text": "a text has any number of prompts"})
    check_data([data, "b.jsonl"], prompts=64)


def test_training_data_are_known_by_name_and_size() -> None:
    data = write("a.jsonl", GOOD)
    known = data_files([data])
    other = Path(write("other.jsonl", GOOD))
    Path("elsewhere").mkdir()
    copy = Path(shutil.copy(data, "elsewhere"))
    assert trained_on([copy, other], known, ()) == [copy]
    assert trained_on([copy, other], [], ["a.jsonl", "other.jsonl"]) == [other]  # older heads name paths alone
    assert trained_on([Path("folder/x.jsonl")], [], ["folder"]) == [Path("folder/x.jsonl")]


@pytest.mark.parametrize("by", ["digest", "path"])
def test_calibrating_on_training_data_warns_in_one_line(by: str, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(HEADS, "heads")
    data, other = write("a.jsonl", *[GOOD] * 3), write("b.jsonl", *[{"prompt_token_ids": [9, 9]}] * 3)
    facts = json.loads(Path("heads/provenance.json").read_text())
    facts["options"]["data"] = [data] if by == "path" else ["elsewhere.jsonl"]
    facts["data_files"] = [file.model_dump() for file in data_files([data])] if by == "digest" else []
    Path("heads/provenance.json").write_text(json.dumps(facts))

    def said(*paths: str) -> list[str]:
        with pytest.raises(AssertionError, match="a model is loaded"):
            main(["calibrate", "heads", "--target", str(DEMO), "--prompts", "2", "--data", *paths])
        return [line for line in capsys.readouterr().err.splitlines() if "warning" in line]

    (line,) = said(data, other)
    assert "these heads were trained on a.jsonl, so the results will be too optimistic" in line
    assert not said(other)

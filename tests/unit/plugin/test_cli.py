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
from vllm_ppd.vllm_plugins.cli.arguments import Command
from vllm_ppd.vllm_plugins.cli.main import COMMANDS, main

GIVEN = ["--model", "m", "--data", "d", "--out", "o"]


def parsed(kind: str, *words: str) -> Any:
    """The options that `ppd train` would run with."""
    seen = []
    command = Command(
        "", "", lambda options: seen.append(options) or 0, KINDS[kind].options
    )
    assert main(words, {"train": command}) == 0
    return seen[0]


def help_of(capsys: Any, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return str(capsys.readouterr().out)


@pytest.mark.parametrize("kind", KINDS)
def test_flags_are_the_fields(kind: str, capsys: Any) -> None:
    text = help_of(capsys, "train", kind)
    for name in ["config", *KINDS[kind].options.model_fields]:
        assert "--" + name.replace("_", "-") in text
    assert "peak learning rate" in text and "(default: " in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str, capsys: Any) -> None:
    assert help_of(capsys, command).startswith(f"usage: ppd {command} ")
    assert command in help_of(capsys)


def test_values_of_flags() -> None:
    made = parsed(
        "cp",
        "train",
        *GIVEN,
        "--layers",
        "2,4",
        "--condition",
        "recurrent",
        "--betas",
        "0.8,0.9",
    )
    assert made == KINDS["cp"].options(
        model="m",
        data=("d",),
        out="o",
        layers=(2, 4),
        condition="recurrent",
        betas=(0.8, 0.9),
    )
    words = [
        "train",
        "--data",
        "a,b.jsonl",
        'x={"y": [1, 2]}',
        "--model",
        "m",
        "--out",
        "o",
    ]
    made = parsed(
        "early", *words, "--train-on-prompts", "--steps", "3", "--exit-layers", "1"
    )
    assert made.data == ("a,b.jsonl", 'x={"y": [1, 2]}')
    assert (made.train_on_prompts, made.steps, made.exit_layers) == (True, 3, (1,))
    assert type(made) is KINDS["early"].options


def test_a_yaml_file_gives_options_and_flags_take_precedence(
    tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(
        "model: m\ndata: [a, b]\nout: o\nsteps: 5\nlearning_rate: 0.5\nexit_layers: "
        "[1, 2]\n"
    )
    made = parsed("early", "train", "--config", str(file), "--steps", "7")
    assert (made.data, made.steps, made.learning_rate) == (("a", "b"), 7, 0.5)
    assert made.exit_layers == (1, 2)
    for content, message in (
        ("a: 1\nb", "no YAML file of options"),
        ("stepz: 5", "--stepz"),
    ):
        file.write_text(content)
        assert main(["train", "early", *GIVEN, "--config", str(file)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert main(["train", "early", *GIVEN, "--config", "none.yaml"]) == 2
    assert "none.yaml cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian'; give one of fit, data, train"),
        (["train", "eagle"], "unknown command 'eagle'; give one of "),
        (
            ["fit", "m", "--out", "o", "--minuts", "3"],
            "unrecognized arguments: --minuts",
        ),
        (
            ["fit", "m", "--out", "o", "--minutes", "x"],
            "--minutes='x': Input should be a valid number",
        ),
        (
            ["fit", "m", "--out", "o", "--minutes", "0"],
            "--minutes='0': Input should be greater than 0",
        ),
        (["fit", "m"], "--out: Field required"),
        (["fit", "--out", "o"], "the following arguments are required: MODEL"),
        (
            ["data", "--model", "m", "--out", "o", "--precision", "int4"],
            "--precision='int4': Input should be",
        ),
        (
            ["train", "cp", *GIVEN, "--rank", "0"],
            "--rank='0': Input should be greater than",
        ),
    ],
)
def test_errors_are_one_line(words: list[str], message: str, capsys: Any) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ppd: error: ") and message in line


def test_inspect_says_whether_heads_load(tiny_model: Factory, capsys: Any) -> None:
    folder = str(DEMO.parent / "heads" / "early")
    assert main(["inspect", folder]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^kind +early$", text, re.MULTILINE)
    assert re.search(r"will load: yes, with \S+", text)
    assert not re.search(r"[{}\[\]]|\b(null|None|True)\b", text)
    for flag in ("--target", "--model"):
        assert main(["inspect", folder, flag, str(tiny_model("qwen2"))]) == 2
        assert "hidden_size is" in capsys.readouterr().err
    assert main(["inspect", folder, "--target", folder + "/.."]) == 2
    assert (
        "the folder has no config.json; give the folder of a model"
        in capsys.readouterr().err
    )
    assert main(["inspect", folder, "--target", "/nowhere"]) == 0
    assert "will load: not known: " in capsys.readouterr().out
    assert main(["inspect", "/nowhere"]) == 2


@pytest.mark.parametrize("command", ["train", "data", "fit", "calibrate"])
def test_what_cannot_be_written_is_named(
    tiny_model: Factory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    command: str,
) -> None:
    """In one line, before any work is done: a path below a file, and a folder that is read-only."""
    (tmp_path / "file").write_text("")
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "some text, which is long enough for a window"}\n' * 20)
    model = str(tiny_model())
    out = str(tmp_path / "file" / "out.jsonl")
    words = {
        "train": [
            "train",
            "early",
            "--model",
            model,
            "--data",
            str(data),
            "--sequence-length",
            "8",
        ],
        "data": ["data", "--model", model, "--prompts", str(data)],
        "fit": ["fit", model, "--prompts", str(data)],
        "calibrate": [
            "calibrate",
            str(DEMO.parent / "heads" / "early"),
            "--data",
            str(data),
        ],
    }[command]
    if command == "calibrate":
        words += ["--prompts", "1"]
        opened = os.open

        def read_only(path: Any, flags: int, *more: Any, **named: Any) -> int:
            if flags & os.O_CREAT:
                raise OSError(errno.EROFS, "Read-only file system", path)
            return opened(path, flags, *more, **named)

        monkeypatch.setattr(os, "open", read_only)
    else:
        words += ["--out", out]
    assert main(words) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search("Not a directory|File exists|Read-only file system", line)
    assert ("demo/heads/early" if command == "calibrate" else "file/out.jsonl") in line

# SPDX-License-Identifier: Apache-2.0
"""`ppd`: commands and flags from the options' models, what `inspect` prints, and how errors end."""

import errno
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO, Factory

from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.vllm_plugins.cli.arguments import Command, options_from
from vllm_ppd.vllm_plugins.cli.main import COMMANDS, main

GIVEN = "--model m --data d --out o"


def parsed(kind: str, words: str) -> Any:
    """The options that `ppd train KIND` would run with."""
    command = COMMANDS["train"].commands()[kind]
    return options_from(command, shlex.split(words), "ppd")


def help_of(capsys: Any, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return str(capsys.readouterr().out)


@pytest.mark.parametrize("kind", KINDS)
def test_flags_are_the_fields(kind: str, capsys: Any) -> None:
    everything = help_of(capsys, "train", kind, "--help=all")
    for name in ["config", *KINDS[kind].options.model_fields]:
        assert "--" + name.replace("_", "-") in everything
    assert "Muon (default: 0.9, 0.95)" in " ".join(everything.split())
    assert "(default: 0)" in help_of(capsys, "train", kind, "--help=seed")
    basic = help_of(capsys, "train", kind)
    assert "--seed" not in basic and "--help=all" in basic and "--steps" in basic


def every_command() -> Iterator[tuple[str, Command]]:
    """The words of each command, and the command."""
    for name, command in COMMANDS.items():
        if isinstance(command, Command):
            yield name, command
        else:
            for second, further in command.commands().items():
                yield f"{name} {second}", further


def test_examples_of_help_are_right(capsys: Any) -> None:
    for name, command in every_command():
        assert name.split()[0] in help_of(capsys)
        assert f"\n  ppd {name} {command.example}\n" in help_of(
            capsys, *name.split()
        )
        options_from(command, command.example.split(), "ppd")


def test_versions(capsys: Any) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("vllm-ppd: 0.")


def test_values_of_flags() -> None:
    made = parsed(
        "cp",
        f"{GIVEN} --layers 2,4 --condition recurrent --betas 0.8,0.9 --train-on-prompts",
    )
    assert made == KINDS["cp"].options(
        model="m",
        data=("d",),
        out="o",
        layers=(2, 4),
        condition="recurrent",
        betas=(0.8, 0.9),
        train_on_prompts=True,
    )
    made = parsed(
        "early", """--data a,b.jsonl 'x={"y": [1, 2]}' --model m --out o"""
    )
    assert made.data == ("a,b.jsonl", 'x={"y": [1, 2]}')
    assert type(made) is KINDS["early"].options


def test_a_yaml_file_gives_options_and_flags_take_precedence(
    tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(
        "model: m\ndata: [a, b]\nout: o\nsteps: 5\nexit-layers: [1, 2]"
    )
    made = parsed("early", f"--config {file} --steps 7")
    assert (made.data, made.steps, made.exit_layers) == (("a", "b"), 7, (1, 2))
    for content, message in (
        ("a: 1\nb", "no YAML file of options"),
        ("stepz: 5", "--stepz"),
    ):
        file.write_text(content)
        refused(f"train early {GIVEN} --config {file}", message, capsys)
    refused(f"train early {GIVEN} --config none", "none cannot be read", capsys)


def refused(words: str, message: str, capsys: Any) -> None:
    """Run a command that ends with a line and exit code 2."""
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ppd: error: ") and message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "unknown command 'trian'; use one of fit, data, train"),
        ("train eagle", "unknown command 'eagle'; use one of "),
        ("fit m --out o --minuts 3", "unrecognized arguments: --minuts"),
        ("train early --model m --data d", "--out is required"),
        ("fit --out o", "the following arguments are required: MODEL"),
        (
            f"train cp {GIVEN} --dtype int4",
            "--dtype='int4': must be 'auto', 'bfloat16' or 'float32'",
        ),
        (
            f"train cp {GIVEN} --rank 0",
            "--rank='0': must be greater than",
        ),
        ("bench decode --model m --data d --temperatures 0,-1", "--temperatures"),
        ("calibrate h --data d --eps-b 0.5,2", "--eps-b='2': must be less"),
        ("bench decode --model m --data d --engine [1]", "a valid dictionary"),
    ],
)
def test_errors_are_one_line(words: str, message: str, capsys: Any) -> None:
    refused(words, message, capsys)


def test_inspect_says_whether_heads_load(
    tiny_model: Factory, capsys: Any
) -> None:
    folder = str(DEMO.parent / "heads" / "early")
    other = tiny_model("qwen2")
    assert main(["inspect", folder]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^kind +early$", text, re.MULTILINE)
    assert re.search(r"will load: yes, with \S+", text)
    assert not re.search(r"[{}\[\]]|\b(null|None|True)\b", text)
    refused(f"inspect {folder} --model {other}", "hidden_size is", capsys)
    refused(
        f"inspect {folder} --model {DEMO.parent}", "has no config.json", capsys
    )
    refused("inspect /nowhere", "/nowhere", capsys)
    assert main(["inspect", folder, "--model", "/nowhere"]) == 0
    assert "will load: not known: " in capsys.readouterr().out


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
    data.write_text(
        '{"text": "some text, which is long enough for a window"}\n' * 20
    )
    model = tiny_model()
    out = tmp_path / "file" / "out.jsonl"
    heads = DEMO.parent / "heads" / "early"
    words = {
        "train": f"train early --model {model} --data {data} --sequence-length 8",
        "data": f"data --model {model} --prompts {data}",
        "fit": f"fit {model} --prompts {data}",
        "calibrate": f"calibrate {heads} --data {data} --num-prompts 1",
    }[command].split()
    if command == "calibrate":
        out = heads
        opened = os.open

        def read_only(path: Any, flags: int, *more: Any, **named: Any) -> int:
            if flags & os.O_CREAT:
                raise OSError(errno.EROFS, "Read-only file system", path)
            return opened(
                path,
                flags,
                *more,
                **named,
            )

        monkeypatch.setattr(os, "open", read_only)
    else:
        words += ["--out", str(out)]
    assert main(words) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search("Not a directory|File exists|Read-only file system", line)
    assert "/".join(out.parts[-2:]) in line

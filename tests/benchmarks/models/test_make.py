# SPDX-License-Identifier: Apache-2.0
"""`make inflated` and `recipes`: every command, in order, once; a stopped make goes on; one writer a folder."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from vllm_ppd.benchmarks.models.__main__ import COMMANDS
from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.heads.locking import writing_folder
from vllm_ppd.heads.quote import place
from vllm_ppd.vllm_plugins.cli.main import main, make_parser


def commands(target: str, out: Path) -> list[str]:
    """The commands that make would run, each of which its parser takes, as COMMAND [KIND] OUT."""
    taken = []
    for line in run_make(target, out).splitlines():
        _, python, words = line.rpartition("python -m ")
        if python:
            module, *arguments = shlex.split(words)
            ours = module == "vllm_ppd.benchmarks.models"
            assert ours or module == "vllm_ppd.vllm_plugins.cli.main"
            args = (make_parser(COMMANDS) if ours else make_parser()).parse_args(arguments)  # ends where it is none
            folder = Path(getattr(args, "heads", None) if arguments[0] == "calibrate" else args.out)
            kind = [arguments[1]] if arguments[0] == "train" and not arguments[1].startswith("--") else []
            taken.append(" ".join([arguments[0], *kind, str(folder.relative_to(out))]))
    return taken


def run_make(target: str, out: Path) -> str:
    """What make prints of the commands that it would run, each in a line."""
    make = ["make", "-n", "-f", "benchmarks/models/models.mk", target, f"OUT={out}"]
    return subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout.replace("\\\n", "")


def test_inflated_is_made_in_order_and_goes_on(tmp_path: Path) -> None:
    made = ["inflate inflated", "corpus corpus"]
    calibrated = [f"calibrate inflated/heads/{kind}" for kind in ("early", "cp", "dynamo")]
    assert commands("inflated", tmp_path) == made + calibrated
    for name in ("corpus/validation.jsonl", "inflated/.inflated"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert commands("inflated", tmp_path) == calibrated


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cp-scratch-8-balance-10", {"rank": 8, "balance": 10.0, "base_start": "random", "factorised": True}),
        ("cp-joint-3-whole", {"rank": 3, "base_start": "trained", "factorised": False, "recipe": "full"}),
        ("t3-continued", {"tokens": 3, "start": "random", "recipe": "full", "stem_learning_rate": 0.0}),
    ],
)
def test_recipes_extend_each_other(name: str, expected: dict[str, Any], tmp_path: Path) -> None:
    target = f"{tmp_path}/recipes/{name}/provenance.json"
    _, _, words = run_make(target, tmp_path).rpartition("main train ")
    kind, *flags = shlex.split(words.splitlines()[0])
    options = vars(make_parser().parse_args(["train", kind, *flags]))
    fields = {field: value for field, value in options.items() if field in KINDS[kind].options.model_fields}
    whole = KINDS[kind].options(**{field: value for field, value in fields.items() if value is not None})
    assert {field: getattr(whole, field) for field in expected} == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ("corpus",), ("train", "--data", __file__), ("inflate", "--model", "any", "--times", "2"),
        ("eagle", "--model", "any", "--data", __file__), ("smollm",),
    ],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_commands_leave_alone_what_another_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with writing_folder(tmp_path):
        assert main([*arguments, "--out", str(tmp_path)], COMMANDS, "models") == 2
    assert f"{place(tmp_path)} is being written by another process" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

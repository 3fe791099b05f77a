# SPDX-License-Identifier: Apache-2.0
"""`make evidence`: commands that exist, results that are kept once they are whole, and what is skipped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_ppd.benchmarks import evidence
from vllm_ppd.benchmarks.harness.results import write_rows
from vllm_ppd.benchmarks.results import outdated
from vllm_ppd.vllm_plugins.cli.arguments import model_of, options_from
from vllm_ppd.vllm_plugins.cli.main import make_parser

PARTS = evidence.parts("data")
WRITE = (
    "import sys; from pathlib import Path; from vllm_ppd.benchmarks.harness.results import write_rows\n"
    "write_rows(Path(sys.argv[-1]), 'soak', [{'a': 1}], [], faults={'cp': sys.argv[1:-2]})"
)


@pytest.mark.parametrize(
    "words", [words for part in PARTS.values() for words in part.commands if words[:3] == evidence.PPD]
)
def test_commands_are_those_of_ppd_bench(words: list[str]) -> None:
    args = make_parser().parse_args(words[2:])
    assert options_from(model_of(args.command), args).model


def test_every_kept_result_that_ages_is_a_part() -> None:
    """But that of ParaDecode's parallel schedule, whose code is gone."""
    kept = {path.stem for path in outdated.results_in(evidence.RESULTS) if not path.stem.startswith("gpu_")}
    assert kept - set(PARTS) == {"paradecode", "soak"}


@pytest.mark.parametrize(
    "name", [name for name, part in PARTS.items() if all(words[:3] == evidence.PPD for words in part.commands)]
)
def test_commands_measure_what_is_stored(name: str) -> None:
    """Options, rounds and candidates of the commands are those of the stored result."""
    asked: dict[str, int] = {}
    for words in evidence.parts("build/data")[name].commands:
        args = make_parser().parse_args(words[2:])
        options: Any = options_from(model_of(args.command), args)
        asked |= {json.dumps(each.essence(), sort_keys=True): each.rounds for each in options.runs}
    kept: dict[str, int] = {}
    for run in json.loads((evidence.RESULTS / f"{name}.json").read_text())["runs"]:
        # `ppd bench acceptance` has no rounds.
        rounds = len({turn["round"] for turn in run["turns"]}) if "round" in run["turns"][0] else options.rounds
        kept[json.dumps(run["options"], sort_keys=True)] = rounds
    assert asked == kept
    if name == "group":
        groups = [contender for contender in run["contenders"] if contender.startswith("group")]
        assert groups == [f"group, k = {k}" for k in options.group]


def stored_faults(path: Path) -> list[str]:
    return [f"{name}: {line}" for name, lines in json.loads(path.read_text())["faults"].items() for line in lines]


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., tuple[int, str]]:
    """measure(*words): a part whose command is given these words; the exit code and what is printed."""
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    monkeypatch.setattr(evidence, "WORK", tmp_path / "work")

    def run(*words: str) -> tuple[int, str]:
        part = evidence.Part(7, [["-c", WRITE, *words]], stored_faults)
        monkeypatch.setattr(evidence, "parts", lambda data: {"soak": part})
        monkeypatch.setattr("sys.argv", ["evidence"])
        return evidence.main(), capsys.readouterr().out

    return run


def test_a_whole_result_is_kept_and_not_measured_again(measure: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, out = measure()
    assert code == 0 and "soak: about 7 minutes, starting at" in out and "the stored result is not there" in out
    assert json.loads((tmp_path / "soak.json").read_text())["rows"] == [{"a": 1}]
    assert "soak: measured with today's code" in measure()[1]


def test_a_result_with_a_fault_is_not_kept(measure: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, out = measure("request 3 differs")
    assert code == 1 and "soak: cp: request 3 differs" in out and not (tmp_path / "soak.json").exists()


def test_a_result_of_older_code_is_measured_again(measure: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    write_rows(tmp_path / "soak.json", "soak", [{"a": 0}], [], faults={})
    old = json.loads((tmp_path / "soak.json").read_text())
    old["sources"]["digest"] = "of older code"
    (tmp_path / "soak.json").write_text(json.dumps(old))
    assert "the stored result is of older code" in measure()[1]
    assert json.loads((tmp_path / "soak.json").read_text())["rows"] == [{"a": 1}]

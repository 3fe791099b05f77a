# SPDX-License-Identifier: Apache-2.0
"""`ppd bench decode`: systems, prompts, trials; real engines that are killed and continued."""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO, ROOT
from records import templated

from vllm_ppd.benchmarks import BASE, CONTROL, BenchError
from vllm_ppd.benchmarks.decode import acceptance_trials, is_whole, speed_trials
from vllm_ppd.benchmarks.options import DecodeOptions
from vllm_ppd.benchmarks.prompts import Prompt, read_prompts
from vllm_ppd.benchmarks.storage import Results
from vllm_ppd.benchmarks.systems import systems_of
from vllm_ppd.heads.planning import theorem_4_1
from vllm_ppd.vllm_plugins.cli.arguments import parse
from vllm_ppd.vllm_plugins.cli.main import COMMANDS, main

CP = str(DEMO.parent / "heads" / "cp")


def options(**changes: Any) -> DecodeOptions:
    return DecodeOptions(
        **{"model": "model", "data": ("a.jsonl",), "plain": "none", **changes}
    )


def write(path: Path, *records: Any) -> tuple[str]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return (str(path),)


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A small benchmark of the demo model."""
    ids = [[(7 * i + j * j) % 250 + 2 for j in range(20)] for i in range(8)]
    records = [
        {"prompt_token_ids": prompt, "category": "ab"[i % 2]}
        for i, prompt in enumerate(ids)
    ]
    (data,) = write(tmp_path / "prompts.jsonl", *records)
    words = [
        "bench",
        "decode",
        "--eager",
        "--model",
        str(DEMO),
        "--data",
        data,
        "--heads",
        CP,
        "--plain",
        "none",
    ]
    words += [
        "--new-tokens",
        "16",
        "--batch-sizes",
        "2",
        "--rounds",
        "2",
        "--dtype",
        "float32",
    ]
    return [*words, "--kv-cache-gib", "0.05", "--out", str(tmp_path / "out.json")]


def turns(folder: Path) -> list[dict[str, Any]]:
    path = folder / "out.json"
    if not path.exists():
        return []
    (run,) = json.loads(path.read_text())["runs"]
    return list(run["turns"])


@pytest.mark.engine
@pytest.mark.ranks
def test_a_killed_run_continues(command: list[str], tmp_path: Path) -> None:
    """Whole trials stay as they are; the one that was stopped is measured again as a whole."""
    command += ["--rounds", "40"]
    ppd = [sys.executable, "-m", "vllm_ppd.vllm_plugins.cli.main"]
    process = subprocess.Popen(
        [*ppd, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while len(turns(tmp_path)) < 5 and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.wait()
    before = turns(tmp_path)
    systems = [BASE, CONTROL, "cp"]
    rounds = len(before) // len(systems) + 1
    assert main([*command, "--rounds", str(rounds)]) == 0
    after = turns(tmp_path)
    assert [(turn["round"], turn["contender"]) for turn in after] == [
        (r, name) for r in range(rounds) for name in systems
    ]
    whole = len(before) // len(systems) * len(systems)
    assert after[:whole] == before[:whole] and after[whole:] != before[whole:]
    for turn in after:
        assert turn["same_tokens"] == turn["compared_tokens"] == 2 * 16
        # The first token of a request comes from its prompt, and the tail of a batch is
        # not timed.
        assert 2 * turn["steps"] <= turn["window_tokens"] <= 2 * 15
        assert sum(turn["accepted_lengths"]) == turn["drafts"]
        accepted = sum(
            length * drafts for length, drafts in enumerate(turn["accepted_lengths"])
        )
        assert accepted == turn["accepted_tokens"]
    assert {turn["contender"] for turn in after if turn["drafts"]} == {"cp"}


@pytest.mark.engine
def test_acceptance_of_all_prompts(
    command: list[str], tmp_path: Path, capsys: Any
) -> None:
    """And a system that does not start is left out."""
    broken = 'broken={"method": "ngram", "num_speculative_tokens": -1}'
    assert main([*command, "--acceptance", "--batch-sizes", "3", "--also", broken]) == 0
    measured = turns(tmp_path)
    # Four prompts of each category, in batches of at most three.
    assert [turn["prompts"] for turn in measured] == [3, 3, 1, 1, 3, 3, 1, 1]
    assert [turn["category"] for turn in measured] == ["a"] * 4 + ["b"] * 4
    assert all(turn["differ"] == [] for turn in measured)
    cp = [turn for turn in measured if turn["contender"] == "cp"]
    assert sum(turn["accepted_tokens"] for turn in cp) > 0
    for turn in cp:
        # A step emits its accepted drafts and one token, but for drafts past the last
        # token.
        assert turn["drafts"] <= turn["request_steps"] <= 15 * turn["prompts"]
        assert turn["request_steps"] + turn["accepted_tokens"] >= 15 * turn["prompts"]
    printed = capsys.readouterr().out
    assert "8 of 8" in printed and "left out: broken: " in printed


def test_systems(tmp_path: Path) -> None:
    also = (
        'lookup={"model": "ppd"}',
        'two={"method": "ngram", "engine": {"tensor_parallel_size": 2}}',
    )
    systems = {
        s.name: s
        for s in systems_of(
            options(heads=(CP,), plain="ppd,ngram", drafts=16, also=also)
        )
    }
    assert list(systems) == [
        BASE,
        CONTROL,
        "cp",
        "ppd, no heads",
        "ngram",
        "lookup",
        "two",
    ]
    assert systems["cp"].speculative_config == {
        "model": CP,
        "num_speculative_tokens": 3,
    }
    assert systems["two"].engine == {"tensor_parallel_size": 2}
    always = {
        s.name: s
        for s in systems_of(options(heads=(CP,), plain="ppd,ngram", acceptance=True))
    }
    drafting = [
        name
        for name, s in always.items()
        if (s.speculative_config or {}).get("adaptive") is False
    ]
    assert CONTROL not in always and drafting == ["cp", "ppd, no heads"]
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Eagle3LlamaForCausalLM"]}'
    )
    (eagle,) = systems_of(options(eagle=str(tmp_path)))[2:]
    assert eagle.name == "eagle3"


def test_worker_groups_are_compared_with_pipelines() -> None:
    systems = systems_of(options(group="1,5", batch_sizes="1,2"))
    assert [s.name for s in systems] == [
        BASE,
        CONTROL,
        "group, k = 1",
        "group, k = 5",
        "TP 2",
    ]
    config = systems[3].speculative_config
    assert config and config["candidates"] == 5 and config["disable_by_batch_size"] == 2
    assert {s.engine.get("pipeline_parallel_size") for s in systems[:4]} == {2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eagle": "nowhere"}, "--eagle nowhere has no config"),
        ({"also": ('{"method": "ppd"}',)}, "not NAME="),
        (
            {"plain": "ngram", "also": ("ngram={}",)},
            "two systems have the name 'ngram'",
        ),
        ({"group": "1", "heads": ("a", "b")}, "a single folder of early heads"),
    ],
)
def test_bad_systems_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        systems_of(options(**changes))


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("k", [1, 3])
def test_theorem_is_the_papers(p: float, k: int) -> None:
    """For l tokens d l - (d - d_bar) (l - 1) p layers, and k (d - d_bar) l more in all."""
    for tokens in (1, 5, 128):
        latency = 40 * tokens - 10 * (tokens - 1) * p
        expected = theorem_4_1(40, 30, k, p, tokens)
        assert [units * tokens for units in expected] == pytest.approx(
            [latency, latency + k * 10 * tokens]
        )


def test_prompts_of_all_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = templated(
        "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if "
        "add_generation_prompt %}!{% endif %}"
    )
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda *_, **__: tokenizer
    )
    chat = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes"},
    ]
    records = (
        {"prompt_token_ids": [5, 6, 7, 8]},
        {"messages": chat},
        {"prompt": "a question"},
        {"text": "x" * 100},
    )
    prompts = [
        prompt.ids
        for prompt in read_prompts(write(tmp_path / "a.jsonl", *records), "any", 12)
    ]
    assert prompts[0] == [5, 6, 7, 8]
    assert [tokenizer.decode(ids) for ids in prompts[1:3]] == ["<hello>!", "a question"]
    assert (
        len(prompts) == 5
        and prompts[3] == prompts[4] == tokenizer("x" * 12)["input_ids"]
    )


def test_categories_take_turns(tmp_path: Path) -> None:
    records = [
        {"prompt_token_ids": [i] * 5, "category": name} for i, name in enumerate("aab")
    ]
    prompts = read_prompts(write(tmp_path / "a.jsonl", *records), "any", 9)
    assert [prompt.category for prompt in prompts] == ["a", "b", "a"]
    trials = acceptance_trials(options(batch_sizes="1", prompts=2), prompts)
    assert [trial.place["category"] for trial in trials] == ["a", "b"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("{", "a.jsonl:1 is no JSON object"),
        ("[3]", "a.jsonl:1 is no JSON object"),
        (
            '{"question": "x"}',
            "a.jsonl:1 has none of prompt_token_ids, messages, prompt and text",
        ),
        ('{"prompt_token_ids": [1, 2]}', "none of 1 prompts has 4 to 9 tokens"),
    ],
)
def test_bad_data_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, message: str
) -> None:
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda *_, **__: None
    )
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(BenchError, match=message.replace("[", r"\[")):
        read_prompts((str(tmp_path / "a.jsonl"),), "any", 9)


def test_more_rounds_keep_the_prompts_of_earlier_ones() -> None:
    prompts = [Prompt([i] * 4) for i in range(50)]
    few, more = (
        speed_trials(options(rounds=rounds, batch_sizes="1,3"), prompts)
        for rounds in (2, 4)
    )
    assert more[: len(few)] == few and len(more) == 8
    firsts = [ids[0] for trial in more for ids in trial.prompts]
    assert len(set(firsts)) == len(firsts)


def test_a_run_continues_with_the_same_options_and_systems_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "out.json"
    results = Results(path, "decode")
    run = results.run_of({"dtype": "float32"}, {BASE: {"stamp": 1}, "cp": {"stamp": 2}})
    (trial,) = speed_trials(options(rounds=1, batch_sizes="1"), [Prompt([1] * 4)])
    run["turns"].append({"contender": BASE, **trial.place})
    assert not is_whole(trial, run)
    run["failures"]["cp"] = "does not start"
    assert is_whole(trial, run)
    results.write()
    again = Results(path, "decode")
    assert (
        again.run_of({"dtype": "float32"}, {BASE: {"stamp": 1}, "cp": {"stamp": 2}})
        == run
    )
    assert (
        again.run_of({"dtype": "float32"}, {BASE: {"stamp": 1}, "cp": {"stamp": 3}})[
            "turns"
        ]
        == []
    )
    path.write_text("[]")
    with pytest.raises(BenchError, match="not a file of results"):
        Results(path, "decode")


def test_make_evidence_has_valid_commands() -> None:
    make = ["make", "-n", "evidence"]
    printed = subprocess.run(
        make, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    commands = [
        line.partition(" bench decode ")[2]
        for line in printed.replace("\\\n", "").splitlines()
    ]
    commands = [command for command in commands if command]
    assert len(commands) == 6
    for command in commands:
        _, given = parse(["bench", "decode", *shlex.split(command)], COMMANDS, "ppd")
        assert isinstance(given, DecodeOptions) and given.out.startswith(
            "build/evidence/"
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch-sizes 0", "--batch-sizes='0': Input should be greater than 0"),
        ("--engine [1]", "--engine=[1]: Input should be a valid dictionary"),
        ("--temperatures 0,-1", "--temperatures"),
        ("--plain lookahead", "--plain"),
    ],
)
def test_bad_flags_end_with_a_line(words: str, message: str, capsys: Any) -> None:
    assert main(["bench", "decode", *words.split(), "--model", "m", "--data", "d"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line

# SPDX-License-Identifier: Apache-2.0
"""`ppd bench decode`: systems, prompts, trials; real engines."""

import json
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import DEMO, ROOT
from forkserver import Forkserver
from records import templated, write

from vllm_ppd.benchmarks import decode, engine
from vllm_ppd.benchmarks.decode import acceptance_trials, is_whole, speed_trials
from vllm_ppd.benchmarks.prompts import Prompt, read_prompts
from vllm_ppd.benchmarks.storage import (
    BASE,
    CONTROL,
    Batch,
    BenchError,
    Results,
)
from vllm_ppd.benchmarks.systems import DecodeOptions, System, systems_of
from vllm_ppd.vllm_plugins.cli.arguments import parse
from vllm_ppd.vllm_plugins.cli.main import COMMANDS, main

CP = str(DEMO.parent / "heads" / "cp")


def options(**changes: Any) -> DecodeOptions:
    return DecodeOptions(
        **{
            "model": "model",
            "data": ("a.jsonl",),
            "baselines": "none",
            **changes,
        }
    )


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A small benchmark of the demo model."""
    ids = [[(7 * i + j * j) % 250 + 2 for j in range(20)] for i in range(8)]
    records = [
        {"prompt_token_ids": prompt, "category": "ab"[i % 2]}
        for i, prompt in enumerate(ids)
    ]
    data = write(tmp_path / "prompts.jsonl", *records)
    command = (
        f"bench decode --model {DEMO} --data {data} --heads {CP} --baselines none --enforce-eager "
        "--output-len 16 --batch-sizes 2 --rounds 2 --dtype float32 "
        f"--kv-cache-gib 0.05 --out {tmp_path}/out.json"
    )
    return command.split()


def turns(folder: Path) -> list[dict[str, Any]]:
    path = folder / "out.json"
    if not path.exists():
        return []
    (run,) = json.loads(path.read_text())["runs"]
    return list(run["turns"])


class FakeEngine:
    """In place of an engine's process; Ctrl-C comes when its calls are used up."""

    calls = 0

    def __init__(self, system: System, *_: Any) -> None:
        self.name = system.name
        if self.name == "broken":
            raise BenchError("broken: does not start")

    def call(self, _: Any, prompts: Batch, new_tokens: int, *__: Any) -> Any:
        FakeEngine.calls -= 1
        if not FakeEngine.calls:
            raise KeyboardInterrupt
        counts = dict.fromkeys(("draft_tokens", "accepted_tokens"), 0)
        return {
            "token_ids": [[7] * new_tokens] * len(prompts),
            "window_tokens": 9,
            "window_seconds": FakeEngine.calls,
            "peak_bytes": None,
            **counts,
        }

    def close(self) -> None:
        pass


def test_a_stopped_run_continues(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """Whole trials stay as they are; the one that was stopped is measured again as a
    whole. A system that does not start is left out.
    """
    monkeypatch.setattr(decode, "EngineProcess", FakeEngine)
    command.append('--contender=broken={"method": "ngram"}')
    # Three to warm up, and four turns
    FakeEngine.calls = 8
    assert main(command) == 130
    before = turns(tmp_path)
    assert len(before) == 4
    FakeEngine.calls = 99
    assert main(command) == 0
    after = turns(tmp_path)
    systems = [BASE, CONTROL, "cp"]
    places = [(turn["round"], turn["contender"]) for turn in after]
    assert places == [(r, name) for r in range(2) for name in systems]
    assert after[:3] == before[:3] and after[3] != before[3]
    assert "left out: broken: does not start" in capsys.readouterr().out


def check(turn: dict[str, Any]) -> None:
    """What holds for a turn of a real engine, of 16 tokens a request."""
    prompts = turn["prompts"]
    assert turn["same_tokens"] == turn["compared_tokens"] == prompts * 16
    # The first token of a request comes from its prompt, and the tail of a batch is
    # not timed.
    timed = prompts * turn["steps"]
    assert timed <= turn["window_tokens"] <= prompts * 15
    lengths = turn["accepted_lengths"]
    assert sum(lengths) == turn["drafts"]
    accepted = sum(length * drafts for length, drafts in enumerate(lengths))
    assert accepted == turn["accepted_tokens"]
    # A step emits its accepted drafts and one token, but for drafts past the last
    # token.
    steps = turn["request_steps"]
    assert turn["drafts"] <= steps <= 15 * prompts <= steps + accepted


@pytest.mark.engine
def test_acceptance_of_all_prompts(
    command: list[str],
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of real engines."""
    forking = SimpleNamespace(get_context=lambda _: Forkserver())
    monkeypatch.setattr(engine, "multiprocessing", forking)
    assert main([*command, "--acceptance", "--batch-sizes=3"]) == 0
    measured = turns(tmp_path)
    # Four prompts of each category, in batches of at most three
    assert [turn["prompts"] for turn in measured] == [3, 3, 1, 1, 3, 3, 1, 1]
    assert [turn["category"] for turn in measured] == ["a"] * 4 + ["b"] * 4
    for turn in measured:
        check(turn)
        assert turn["differ"] == []
    drafting = {turn["contender"] for turn in measured if turn["accepted_tokens"]}
    assert drafting == {"cp"}
    assert "8 of 8" in capsys.readouterr().out


def named(**changes: Any) -> dict[str, Any]:
    """The systems of options, by name."""
    return {system.name: system for system in systems_of(options(**changes))}


def test_systems(tmp_path: Path) -> None:
    also = (
        'found={"model": "ppd"}',
        'two={"method": "ngram", "engine": {"tensor_parallel_size": 2}}',
    )
    systems = named(
        heads=(CP,),
        baselines="lookup,ngram",
        num_speculative_tokens=16,
        contender=also,
    )
    names = [
        BASE,
        CONTROL,
        "cp",
        "lookup",
        "ngram",
        "found",
        "two",
    ]
    assert list(systems) == names
    config = systems["cp"].speculative_config
    assert config == {"model": CP, "num_speculative_tokens": 3}
    assert systems["two"].engine == {"tensor_parallel_size": 2}
    (tmp_path / "config.json").write_text('{"architectures": ["Eagle3LlamaFor"]}')
    assert "eagle3" in named(eagle=str(tmp_path))


def test_acceptance_has_drafts_in_every_step() -> None:
    systems = named(heads=(CP,), baselines="ngram", acceptance=True)
    assert list(systems) == [BASE, "cp", "ngram"]
    assert systems["cp"].speculative_config["adaptive"] is False
    assert "adaptive" not in systems["ngram"].speculative_config


def test_worker_groups_are_compared_with_pipelines() -> None:
    systems = named(group="1,5", batch_sizes="1,2")
    groups = ["group, k = 1", "group, k = 5"]
    assert list(systems) == [BASE, CONTROL, *groups, "TP 2"]
    config = systems["group, k = 5"].speculative_config
    assert config["candidates"] == 5 and config["disable_by_batch_size"] == 2
    for name in (BASE, CONTROL, *groups):
        assert systems[name].engine == {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eagle": "nowhere"}, "--eagle nowhere has no config"),
        ({"contender": ('{"method": "ppd"}',)}, "not NAME="),
        (
            {"baselines": "ngram", "contender": ("ngram={}",)},
            "two systems have the name 'ngram'",
        ),
        ({"group": "1", "heads": ("a", "b")}, "a single folder of early heads"),
    ],
)
def test_bad_systems_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        systems_of(options(**changes))


def test_prompts_of_all_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = templated(
        "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if "
        "add_generation_prompt %}!{% endif %}"
    )
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda *_, **__: tokenizer
    )
    question = {"role": "user", "content": "hello"}
    answer = {"role": "assistant", "content": "yes"}
    data = write(
        tmp_path / "a.jsonl",
        {"prompt_token_ids": [5, 6, 7, 8]},
        {"messages": [question, answer]},
        {"prompt": "a question"},
        {"text": "x" * 100},
        {"text": "short"},
    )
    ids, *others = [prompt.ids for prompt in read_prompts((data,), "any", 12)]
    assert ids == [5, 6, 7, 8]
    texts = [tokenizer.decode(prompt) for prompt in others]
    assert texts == ["<hello>!", "a question", "x" * 12, "short", "x" * 12]


def test_categories_take_turns(tmp_path: Path) -> None:
    records = [
        {"prompt_token_ids": [i] * 5, "category": name}
        for i, name in enumerate("aab")
    ]
    data = write(tmp_path / "a.jsonl", *records)
    prompts = read_prompts((data,), str(DEMO), 9)
    assert [prompt.category for prompt in prompts] == ["a", "b", "a"]
    trials = acceptance_trials(options(batch_sizes="1", num_prompts=2), prompts)
    assert [trial.place["category"] for trial in trials] == ["a", "b"]


def test_data_without_prompts_are_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", {"prompt_token_ids": [1, 2]})
    with pytest.raises(BenchError, match="no prompt has 4 to 9 tokens"):
        read_prompts((data,), str(DEMO), 9)


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
    given = {"dtype": "float32"}
    systems = {BASE: {"stamp": 1}, "cp": {"stamp": 2}}
    results = Results(path)
    run = results.run_of(given, systems)
    (trial,) = speed_trials(options(rounds=1, batch_sizes="1"), [Prompt([1] * 4)])
    run["turns"].append({"contender": BASE, **trial.place})
    assert not is_whole(trial, run)
    run["failures"]["cp"] = "does not start"
    assert is_whole(trial, run)
    results.write()
    again = Results(path)
    assert again.run_of(given, systems) == run
    assert again.run_of(given, systems | {"cp": {"stamp": 3}})["turns"] == []
    path.write_text("[]")
    with pytest.raises(BenchError, match="not a file of results"):
        Results(path)


def test_make_evidence_has_valid_commands() -> None:
    make = ["make", "-n", "evidence"]
    printed = subprocess.run(
        make, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    commands = 0
    for line in printed.replace("\\\n", "").splitlines():
        _, command, flags = line.partition(" bench decode ")
        if command:
            words = ["bench", "decode", *shlex.split(flags)]
            _, given = parse(words, COMMANDS, "ppd")
            assert given.out.startswith("build/evidence/")
            commands += 1
    assert commands == 8

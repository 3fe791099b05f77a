# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: contenders, sessions in which some fail, files of results, prompts, and a parent's death."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from conftest import DEMO, Factory

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.decode.options import DecodeOptions
from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender, contenders
from vllm_ppd.benchmarks.harness.engine import Engine
from vllm_ppd.benchmarks.harness.prompts import read_prompts
from vllm_ppd.benchmarks.harness.results import Results
from vllm_ppd.benchmarks.harness.session import Session
from vllm_ppd.vllm_plugins.cli.main import main
from vllm_ppd.vllm_plugins.draft_length.costs import CostTable, StepCosts
from vllm_ppd.vllm_plugins.draft_length.scheduled import ScheduledDrafts


def options(**changes: Any) -> DecodeOptions:
    return DecodeOptions(**{"model": "model", "data": ("prompts.jsonl",), "plain": "none", **changes})


def test_engines_start_beside_others_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM wants that share of the GPU free at the start; the KV cache has a size of its own."""
    assert "gpu_memory_utilization" not in options().engine_arguments
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = options(kv_cache_gib=3).engine_arguments
    assert arguments["kv_cache_memory_bytes"] == 3 << 30 and arguments["gpu_memory_utilization"] < 0.05
    assert options(engine='{"gpu_memory_utilization": 0.5}').engine_arguments["gpu_memory_utilization"] == 0.5


class Sham:
    """A contender without an engine."""

    facts: ClassVar[dict[str, Any]] = {"free_bytes": 10, "peak_bytes": 1}

    def __init__(self, name: str) -> None:
        self.name = name

    def close(self) -> None:
        pass


class Shams(Session[Sham, int]):
    """Contenders that fail at the start, while they load, in a turn, or never."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.events: list[str] = []

    def start(self, contender: Contender, log: Path) -> Sham:
        self.events.append(f"start {contender.name}")
        if contender.name == "broken":
            raise BenchError("broken: no such layer")
        return Sham(contender.name)

    def ready(self, running: Sham) -> None:
        self.events.append(f"ready {running.name}")
        if running.name == "slow":
            raise BenchError("slow: out of memory")

    def warm_up(self, running: Sham, load: int) -> None:
        pass

    def turn(self, running: Sham, load: int, number: int) -> dict[str, Any]:
        if running.name == "fragile" and number == 1:
            raise BenchError("fragile: out of memory")
        return {"batch": load}


def test_what_fails_is_left_out(tmp_path: Path) -> None:
    """A contender that does not start, and another that fails in its second turn; the others go on."""
    made, everyone = options(out=str(tmp_path / "bench.json"), rounds=3), [
        Contender(name) for name in (BASE, "broken", "fragile", "sound")
    ]  # fmt: skip
    results = Results(made, everyone)
    Shams(made, {1: results}).measure(everyone)
    assert results.run["failures"] == {"broken": "broken: no such layer", "fragile": "fragile: out of memory"}
    order = [(turn["round"], turn["contender"]) for turn in results.run["turns"]]
    assert order == [(0, BASE), (0, "fragile"), (0, "sound"), (1, BASE), (1, "sound"), (2, BASE), (2, "sound")]
    assert results.run["finished"]
    assert results.notes == ["left out: broken: no such layer", "left out: fragile: out of memory"]


def test_engines_that_start_together(tmp_path: Path) -> None:
    """All of a group start before any is waited for; which fails is left out, and closed."""
    everyone = [Contender(name) for name in (BASE, "a", "slow", "broken", "b")]
    made = options(out=str(tmp_path / "bench.json"), rounds=1, alive=4, together=True)
    shams = Shams(made, {1: (results := Results(made, everyone))})
    shams.measure(everyone)
    first = [f"start {name}" for name in (BASE, "a", "slow", "broken")]
    assert shams.events == [*first, *(f"ready {name}" for name in (BASE, "a", "slow")), "start b", "ready b"]
    assert results.run["failures"] == {"broken": "broken: no such layer", "slow": "slow: out of memory"}
    assert [turn["contender"] for turn in results.run["turns"]] == [BASE, "a", BASE, "b"]
    with pytest.raises(ValueError, match="--together needs --alive"):
        options(together=True)


def test_a_run_each_temperature(tmp_path: Path) -> None:
    """All in a file, each with turns that were before."""
    made = options(out=str(tmp_path / "bench.json"), temperatures="0,0.7")
    for times in (1, 2):
        first = Results(made.runs[0], contenders(made))
        second = Results(made.runs[1], contenders(made), first)
        for results in (second, first):
            results.add(
                {"contender": BASE, "group": 0, "round": 0, "temperature": results.run["options"]["temperature"]}
            )
            assert len(results.paired(BASE)) == times
        second.finish(predicted={})
    runs = json.loads((tmp_path / "bench.json").read_text())["runs"]
    assert [run["options"]["temperature"] for run in runs] == [0.0, 0.7] * 2
    assert all(run["turns"][0]["temperature"] == run["options"]["temperature"] for run in runs)
    assert [run["finished"] for run in runs] == [False, True] * 2
    with pytest.raises(ValueError, match="must be given once"):
        options(temperatures="1,1")


@pytest.mark.parametrize(
    ("text", "message"), [("[]", "not a file of results"), ('{"benchmark": "serve", "runs": []}', "another benchmark")]
)
def test_files_of_something_else_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(BenchError, match=message):
        Results(options(out=str(tmp_path / "bench.json")), [])
    assert (tmp_path / "bench.json").read_text() == text


def test_contenders(tmp_path: Path) -> None:
    cp = str(DEMO.parent / "heads" / "cp")
    by_name = {c.name: c for c in contenders(options(heads=(cp,), plain="ppd,ngram", drafts=16))}
    assert list(by_name) == [BASE, CONTROL, "cp", "ppd, no heads", "ngram"]
    assert by_name["cp"].speculative_config == {"model": cp, "num_speculative_tokens": 3}
    assert by_name["ngram"].speculative_config["num_speculative_tokens"] == 16  # type: ignore[index]
    two, v1 = 'two={"method": "ppd", "engine": {"tensor_parallel_size": 2}}', 'V1={"environment": {"A": "0"}}'
    further, alone = contenders(options(also=(two, v1)))[2:]
    assert (alone.speculative_config, alone.environment) == (None, {"A": "0"})
    assert (further.speculative_config, further.engine) == ({"method": "ppd"}, {"tensor_parallel_size": 2})
    (tmp_path / "config.json").write_text('{"architectures": ["Eagle3LlamaForCausalLM"]}')
    (eagle,) = contenders(options(eagle=str(tmp_path)))[2:]
    assert eagle.speculative_config["method"] == "eagle3"  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eagle": "nowhere"}, "--eagle nowhere has no config"),
        ({"also": ('{"method": "ppd"}',)}, "not NAME="),
        ({"plain": "ppd", "also": ("ppd, no heads={}",)}, "two contenders are called 'ppd, no heads'"),
        ({"also": ('a={"shares": "b"}',)}, '"shares" names a contender before it'),
    ],
)
def test_contenders_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        contenders(options(**changes))


def test_turns_draft_adaptively_or_always() -> None:
    engine, drafts = object.__new__(Engine), ScheduledDrafts(3, None, 4)
    engine._core, engine._paused = SimpleNamespace(scheduler=SimpleNamespace(dynamic_sd_lookup=drafts)), None
    drafts.follow(StepCosts(CostTable(sizes=[1], counts=[0, 3], seconds=[[1.0, 9.0]])))
    for adaptive in (False, True):
        engine.adapt(adaptive)
        assert (drafts.controller is not None) == adaptive


def test_prompts_of_texts_and_token_ids(tiny_model: Factory, tmp_path: Path) -> None:
    """Ids are taken whole, longer ones left out; of texts the middle first: strides of 32 tokens leave three places of
    100, two of 40.
    """
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt_token_ids": [*range(2, 22 + i)]}) + "\n" for i in range(16)))
    assert read_prompts((str(data),), "-", 24, 100, False) == [[*range(2, end)] for end in range(22, 27)]
    with pytest.raises(BenchError, match="or a prompt of up to 3; give longer documents, or more --prompt-tokens"):
        read_prompts((str(data),), "-", 3, 9, False)
    data.write_text("\n".join(json.dumps({"text": text}) for text in ("a" * 100, "short one", "b" * 40)))
    prompts = read_prompts((str(data),), str(tiny_model()), 8, 100, False)
    assert [len(ids) for ids in prompts] == [8, 8, 8, 8, 8, 8]
    assert prompts[0] == prompts[3] == prompts[5] != prompts[1]
    assert read_prompts((str(data),), str(tiny_model()), 8, 2, False) == prompts[:2]
    data.write_text(json.dumps({"text": "ab"}))
    with pytest.raises(BenchError, match="no document has 4 tokens"):
        read_prompts((str(data),), str(tiny_model()), 8, 2, False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("decode --batch-sizes 0", "--batch-sizes 0: input should be greater than 0"),
        ("decode --engine [1]", "--engine [1]: input should be a valid dictionary"),
        ("decode --temperatures 0,-1", "--temperatures"),
        ("decode --plain lookahead", "--plain"),
        ("decode --group 1 --turn-steps 4", "--turn-steps: vLLM's ranks spin for a second after a step"),
        ("serve --rates nan", "--rates nan: input should be greater than 0"),
        ("serve --rates none --concurrencies none", "--concurrencies none: no load is left"),
    ],
)
def test_bad_flags_end_with_a_line(words: str, message: str, capsys: Any) -> None:
    assert main(["bench", *words.split(), "--model", "m", "--data", "d"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line

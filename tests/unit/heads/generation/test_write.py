# SPDX-License-Identifier: Apache-2.0
"""`ppd data` without vLLM: prompts, user turns, order, what is left out, and runs that continue."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Factory
from records import TEMPLATE, templated

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.generation import write
from vllm_ppd.heads.generation.options import DataOptions
from vllm_ppd.heads.generation.output import Chat, ChatFile
from vllm_ppd.heads.generation.prompts import ChatTemplate
from vllm_ppd.heads.generation.write import ChatWriter, Continuation, Engine, Request, Writer
from vllm_ppd.heads.locking import InUse
from vllm_ppd.vllm_plugins.cli import data
from vllm_ppd.vllm_plugins.cli.data import progress_bar, reporter
from vllm_ppd.vllm_plugins.cli.main import main

END = 0
TURNS = ["what is two?", "What is  two?", "why?", "", "tell me \ufffd", "and then?", "how so?", "is it?"]


class FakeEngine:
    """Writes what the seed says, and ends requests in another order than they came."""

    def __init__(self, order: int = 0, stop_after: int | None = None) -> None:
        self.requests: dict[str, tuple[int, Request]] = {}
        self.order, self.stop_after, self.steps, self.most = random.Random(order), stop_after, 0, 0
        self.generated = 0

    def submit(self, request: Request) -> None:
        assert request.key not in self.requests
        self.requests[request.key] = (self.order.randint(1, 6), request)
        self.most = max(self.most, len(self.requests))

    def step(self) -> list[Continuation]:
        self.steps += 1
        self.generated += len(self.requests)
        if self.steps == self.stop_after:
            raise KeyboardInterrupt
        self.requests = {key: (left - 1, request) for key, (left, request) in self.requests.items()}
        ended = [request for left, request in self.requests.values() if not left]
        for request in ended:
            del self.requests[request.key]
        return [self.continuation(request) for request in ended]

    def continuation(self, request: Request) -> Continuation:
        chosen = random.Random(request.seed)
        if request.wants_text:
            reason = "length" if chosen.random() < 0.1 else "stop"
            return Continuation(request.key, [END], f" {chosen.choice(TURNS)}{chosen.randint(0, 3) or ''}", reason)
        ids = [chosen.randint(1, 200) for _ in range(chosen.randint(1, 9))]
        cut_off = chosen.random() < 0.3
        return Continuation(request.key, ids if cut_off else [*ids, END], "", "length" if cut_off else "stop")


def options(**changes: Any) -> DataOptions:
    return DataOptions(**{"model": "any", "out": "-", "batch": 7, **changes})


Run = Callable[..., list[dict[str, Any]]]


def write_prompts(path: Path, engine: Engine, wanted: float = float("inf"), count: int = 40) -> list[Any]:
    with ChatFile(path, options().essence()) as file:
        list(file.read())
        Writer(options(), engine, file).answer(iter([[i + 1, 5] for i in range(count)]), wanted)
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_chats(path: Path, engine: Engine, wanted: int = 12) -> list[Any]:
    template = ChatTemplate(templated(TEMPLATE), None)
    with ChatFile(path, options().essence()) as file:
        seen = {template.key(chat.prompt_token_ids) for chat in file.read()}
        ChatWriter(options(), engine, file).converse(template, seen, wanted)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_is_in_the_prompts_order_in_the_end(tmp_path: Path) -> None:
    engine = FakeEngine()
    chats = write_prompts(tmp_path / "a.jsonl", engine)
    assert engine.most == 7
    assert [chat["prompt_token_ids"] for chat in chats] == [[i + 1, 5] for i in range(40)]
    assert {chat["finish_reason"] for chat in chats} == {"stop", "length"}
    assert all((chat["token_ids"][-1] == END) == (chat["finish_reason"] == "stop") for chat in chats)


@pytest.mark.parametrize("run", [write_prompts, write_chats])
def test_a_stopped_run_continues_to_the_same_file(tmp_path: Path, run: Run) -> None:
    """Whatever order requests end in, and however often the run is stopped, killed within a line, or extended."""
    whole = run(tmp_path / "whole.jsonl", FakeEngine(order=1), 12)
    assert len(whole) == 12
    path = tmp_path / "stopped.jsonl"
    for stop_after in (5, 4, 3):
        with pytest.raises(KeyboardInterrupt):
            run(path, FakeEngine(stop_after, stop_after), 12)
        with path.open("ab") as file:
            file.write(b'{"prompt_token_ids": [1')
    run(path, FakeEngine(order=5), 10)
    assert run(path, FakeEngine(order=3), 12) == whole
    assert (tmp_path / "whole.jsonl").read_bytes() == path.read_bytes()


def test_the_bar_shows_tokens_from_the_first_step_on(tmp_path: Path, capsys: Any) -> None:
    with ChatFile(tmp_path / "a.jsonl", options().essence()) as file, progress_bar(file, 40) as bar:
        list(file.read())
        report = reporter(bar)
        Writer(options(), FakeEngine(3), file, report).answer(iter([[i + 1, 5] for i in range(40)]), 40)
    shown = capsys.readouterr().err.split("\r")
    assert [line for line in shown if "0/40" in line and " 7 tokens, " in line and "7 begun" in line], shown
    assert "40/40" in shown[-1]


def test_user_turns_are_filtered_and_written_once(tmp_path: Path) -> None:
    words = templated(TEMPLATE)
    prompts = [words.decode(chat["prompt_token_ids"]) for chat in write_chats(tmp_path / "a.jsonl", FakeEngine(), 15)]
    assert all(text.startswith("<system>be<|end|><user>") and text.endswith("<|end|>\n<assistant>") for text in prompts)
    turns = [text.split("<user>")[1].split("<|end|>")[0] for text in prompts]
    assert len({" ".join(turn.casefold().split()) for turn in turns}) == 15
    assert all(turn and turn == turn.strip() and "\ufffd" not in turn for turn in turns)


def test_a_model_without_a_chat_template_writes_whole_texts(tmp_path: Path, tiny_model: Factory) -> None:
    out = options(model=str(tiny_model()), out=str(tmp_path / "a.jsonl"), number=9)

    def enough(writer: Writer) -> None:
        if writer.file.count >= 3:
            writer.wanted = min(writer.wanted, writer.file.count + writer.open)

    file = data.write_chats(out, lambda _: FakeEngine(), enough)
    chats = chats_of(file.path, model=out.model)
    assert [(chat.index, chat.prompt_token_ids) for chat in chats] == [(i, [END]) for i in range(len(chats))]
    assert 3 <= len(chats) == file.count
    file = data.write_chats(out, lambda _: FakeEngine())
    assert file.count == 9 and chats_of(file.path, model=out.model)[: len(chats)] == chats


def test_a_model_that_writes_nothing_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "MOST_REFUSED", 60)
    with pytest.raises(TrainingError, match=r"the last 60 user turns are not usable \(\d+ were written before"):
        write_chats(tmp_path / "a.jsonl", FakeEngine(), 500)


def test_each_request_has_a_seed_of_its_own(tmp_path: Path) -> None:
    asked: list[Request] = []

    class Engine(FakeEngine):
        def submit(self, request: Request) -> None:
            asked.append(request)
            super().submit(request)

    write_chats(tmp_path / "a.jsonl", Engine())
    assert len({request.seed for request in asked}) == len(asked)
    turn = next(request for request in asked if request.wants_text)
    assert (turn.temperature, turn.top_p, turn.max_tokens, turn.stop_ids) == (1.0, 0.95, 256, (END,))
    answer = next(request for request in asked if not request.wants_text)
    assert (answer.temperature, answer.top_p, answer.max_tokens, answer.stop_ids) == (0.8, 0.95, 512, ())


def chats_of(path: Path, **changes: Any) -> list[Chat]:
    with ChatFile(path, options(**changes).essence()) as file:
        return list(file.read())


def test_files_of_other_options_and_damaged_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_prompts(path, FakeEngine(), 5)
    assert len(chats_of(path, number=9, batch=1, precision="float32")) == 5
    with pytest.raises(TrainingError, match=r"was written with temperature=0\.8, but this run has 0\.5: give the same"):
        chats_of(path, temperature=0.5)
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"stop"', b'"what"', 1))
    with pytest.raises(TrainingError, match=r"a\.jsonl:\d is damaged; delete this line and run the command again"):
        chats_of(path)
    path.write_bytes(good)
    (tmp_path / ".a.jsonl.options.json").unlink()
    with pytest.raises(TrainingError, match="was not written by `ppd data`; give another file"):
        chats_of(path)


def test_a_file_that_another_run_writes_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_prompts(path, FakeEngine(), 5)
    with ChatFile(path, options().essence()) as first:
        list(first.read())
        with pytest.raises(InUse, match=r"a\.jsonl is being written by another process; wait for it"):
            write_prompts(path, FakeEngine(), 9)
        first.write(Chat(prompt_token_ids=[6, 5], token_ids=[1], finish_reason="length", index=5))
    assert len(chats_of(path)) == 6


def test_bad_input_ends_with_one_line(tmp_path: Path, tiny_model: Factory, capsys: Any) -> None:
    command = ["data", "--model", str(tiny_model()), "--out", str(tmp_path / "a.jsonl")]
    for more, message in (
        (["--prompts", str(tmp_path / "none.jsonl")], "does not exist"),
        (["--top-p", "0"], "--top-p 0: input should be greater than 0"),
    ):
        assert main([*command, *more]) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

# SPDX-License-Identifier: Apache-2.0
"""`ppd data` without vLLM: prompts, user turns, what is left out, and runs that continue."""

import itertools
import json
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from records import TEMPLATE, templated, write

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.generation import write as generation
from vllm_ppd.heads.generation.options import DataOptions
from vllm_ppd.heads.generation.write import (
    ChatFile,
    Sampling,
    beginning,
    read_prompts,
    user_turns,
    write_chats,
)

END = 0
TURNS = ["what is two?", "why?", "", "tell me \ufffd", "and then?", "how so?", "is it?"]


class FakeEngine:
    """Writes what the seeds say; it is interrupted before batch `stop_before`."""

    def __init__(self, stop_before: int | None = None) -> None:
        self.batches: list[tuple[list[list[int]], list[int], Sampling]] = []
        self.stop_before = stop_before

    def generate(
        self, prompts: list[list[int]], seeds: list[int], sampling: Sampling
    ) -> list[SimpleNamespace]:
        if len(self.batches) == self.stop_before:
            raise KeyboardInterrupt
        self.batches.append((prompts, seeds, sampling))
        return [self.continuation(seed) for seed in seeds]

    def continuation(self, seed: int) -> SimpleNamespace:
        chosen = random.Random(seed)
        turn = f" {chosen.choice(TURNS)}{chosen.randint(0, 3) or ''}"
        ids = [chosen.randint(1, 200) for _ in range(chosen.randint(1, 9))]
        if chosen.random() < 0.3:
            return SimpleNamespace(token_ids=ids, text=turn, finish_reason="length")
        ids.append(END)
        return SimpleNamespace(token_ids=ids, text=turn, finish_reason="stop")

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = templated(TEMPLATE)
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: made
    )
    return made


def options(out: Path | str = "-", **changes: Any) -> DataOptions:
    return DataOptions(**{"model": "any", "out": str(out), "batch": 7, **changes})


def chats(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts_file(folder: Path) -> str:
    return write(
        folder / "prompts.jsonl", *({"prompt_token_ids": [i + 1, 5]} for i in range(40))
    )


def test_answers_are_in_the_prompts_order(tmp_path: Path) -> None:
    engine = FakeEngine()
    out = options(tmp_path / "a.jsonl", prompts=(prompts_file(tmp_path),))
    assert write_chats(out, lambda _: engine).count == 40
    written = chats(tmp_path / "a.jsonl")
    assert [chat["prompt_token_ids"] for chat in written] == [
        [i + 1, 5] for i in range(40)
    ]
    assert {chat["finish_reason"] for chat in written} == {"stop", "length"}
    assert all(
        (chat["token_ids"][-1] == END) == (chat["finish_reason"] == "stop")
        for chat in written
    )
    seeds = [seeds for _, seeds, _ in engine.batches]
    assert len(set(itertools.chain(*seeds))) == 40 and max(map(len, seeds)) == 7
    assert engine.batches[0][2] == Sampling(0.8, 0.95, 512)


@pytest.mark.parametrize(
    ("has_prompts", "fewer", "number"), [(True, 25, 30), (False, 10, 12)]
)
def test_a_run_that_is_killed_continues_to_the_same_file(
    tmp_path: Path, has_prompts: bool, fewer: int, number: int
) -> None:
    """After batches, and within a line; and a file can be extended."""
    prompts = (prompts_file(tmp_path),) if has_prompts else ()
    whole = tmp_path / "whole.jsonl"
    killed = tmp_path / "killed.jsonl"

    def run(out: Path, number: int, stop_before: int | None = None) -> None:
        given = options(out, prompts=prompts, number=number)
        write_chats(given, lambda _: FakeEngine(stop_before))

    run(whole, number)
    for stop_before in (2, 1):
        with pytest.raises(KeyboardInterrupt):
            run(killed, number, stop_before)
        with killed.open("ab") as file:
            file.write(b'{"prompt_token_ids": [1')
    run(killed, fewer)
    assert len(chats(killed)) >= fewer
    run(killed, number)
    assert killed.read_bytes() == whole.read_bytes()


def test_user_turns_are_filtered_and_written_once(
    tmp_path: Path, tokenizer: Any
) -> None:
    write_chats(options(tmp_path / "a.jsonl", number=15), lambda _: FakeEngine())
    prompts = [
        tokenizer.decode(chat["prompt_token_ids"])
        for chat in chats(tmp_path / "a.jsonl")
    ]
    assert all(text.endswith("<|end|>\n<assistant>") for text in prompts)
    turns = [text.split("<user>")[1].split("<|end|>")[0] for text in prompts]
    assert len(set(turns)) == 15
    assert all(turn and turn == turn.strip() and "\ufffd" not in turn for turn in turns)


def test_a_model_that_writes_nothing_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MOST_REFUSED", 60)
    with pytest.raises(
        TrainingError, match="user turns are too long, empty or repeated; give --prom"
    ):
        write_chats(options(tmp_path / "a.jsonl", number=500), lambda _: FakeEngine())


def test_a_time_limit_ends_after_a_batch(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = None  # whole texts
    file = write_chats(
        options(tmp_path / "a.jsonl"), lambda _: FakeEngine(), time.monotonic()
    )
    assert file.count == 7
    assert {tuple(chat["prompt_token_ids"]) for chat in chats(file.path)} == {(END,)}


def test_files_of_other_options_and_damaged_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_chats(options(path, number=5), lambda _: FakeEngine())
    assert ChatFile(path, options(number=9, batch=1).essence()).count == 5
    with pytest.raises(
        TrainingError, match=r"was written with temperature=0\.8, but this run has 0\.5"
    ):
        ChatFile(path, options(temperature=0.5).essence())
    path.write_bytes(path.read_bytes().replace(b'"index"', b'"what"', 1))
    with pytest.raises(
        TrainingError, match=r"a\.jsonl:\d is damaged; delete this line"
    ):
        ChatFile(path, options().essence())
    other = write(tmp_path / "b.jsonl", {"text": "mine"})
    with pytest.raises(
        TrainingError, match="was not written by `ppd data`; give another file"
    ):
        ChatFile(Path(other), options().essence())


@pytest.mark.parametrize(
    ("template", "system", "prefix", "stop"),
    [
        (TEMPLATE, None, "<system>be<|end|><user>", None),
        (TEMPLATE, "do", "<system>do<|end|>\n<user>", None),
        (
            "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}",
            None,
            "[INST] ",
            ["[/INST]"],
        ),
    ],
)
def test_a_user_turn_begins_and_ends_as_in_the_template(
    tmp_path: Path,
    template: str,
    system: str | None,
    prefix: str,
    stop: list[str] | None,
) -> None:
    words = templated(template)
    given = options(tmp_path / "a.jsonl", system=system)
    file = ChatFile(tmp_path / "a.jsonl", given.essence())
    engine = FakeEngine()
    next(user_turns(given, words, engine, file))
    prompts, _, sampling = engine.batches[0]
    assert {words.decode(prompt) for prompt in prompts} == {prefix}
    assert (sampling.stop_token_ids, sampling.stop) == ([END], stop)
    with pytest.raises(TrainingError, match=r"^--model: .* give --prompts"):
        upper = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
        next(user_turns(given, templated(upper), engine, file))


def test_texts_begin_with_the_token_that_begins_or_ends_one() -> None:
    words = templated(None)
    words.bos_token = None
    assert beginning(words) == [words.eos_token_id]
    words.eos_token = None
    with pytest.raises(TrainingError, match=r"^--model: .* give --prompts"):
        beginning(words)


def test_prompts_of_every_form_of_record(tmp_path: Path, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write(
        tmp_path / "a.jsonl",
        {"messages": chat},
        {"prompt": "one ", "response": "two"},
        {"prompt_token_ids": [7, 8], "token_ids": [9]},
        {"prompt_token_ids": [3] * 60},
        {"text": "abcdefghijklmnopqrstuvwxyz"},
    )
    given = options(prompts=(path,), prompt_tokens=4, max_length=60)
    asked = tokenizer.apply_chat_template(
        chat[:1], tokenize=False, add_generation_prompt=True
    )
    texts = (asked, "one ", [7, 8], "abcd", "qrst")
    assert list(read_prompts(given, tokenizer)) == [
        tokenizer(text)["input_ids"] if isinstance(text, str) else text
        for text in texts
    ]
    long = write(tmp_path / "b.jsonl", {"prompt_token_ids": [3] * 60})
    with pytest.raises(
        TrainingError, match="--prompts: no record has a prompt of at most 59 tokens"
    ):
        list(read_prompts(options(prompts=(long,), max_length=60), tokenizer))

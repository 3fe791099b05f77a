# SPDX-License-Identifier: Apache-2.0
"""`ppd data` without vLLM: prompts, user turns, what is left out, and runs that continue."""

import itertools
import math
import random
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from conftest import Factory
from records import TEMPLATE, read, templated, write

from vllm_ppd.heads import generation
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.generation import Sampling, write_chats
from vllm_ppd.heads.options import DataOptions

END = 0
TURNS = [
    "what is two?",
    "why?",
    "",
    "tell me \ufffd",
    "and then?",
    "how so?",
    "is it?",
]


class FakeEngine:
    """Writes what the seeds say; it is interrupted before batch `stop_before`."""

    def __init__(
        self,
        stop_before: int | None = None,
    ) -> None:
        self.batches: list[tuple[list[list[int]], list[int], Sampling]] = []
        self.stop_before = stop_before

    def generate(
        self, prompts: list[list[int]], seeds: list[int], sampling: Sampling
    ) -> list[SimpleNamespace]:
        if len(self.batches) == self.stop_before:
            raise KeyboardInterrupt
        self.batches.append((prompts, seeds, sampling))
        return [self.continuation(seed) for seed in seeds]

    def continuation(
        self,
        seed: int,
    ) -> SimpleNamespace:
        chosen = random.Random(seed)
        turn = f" {chosen.choice(TURNS)}{chosen.randint(0, 3) or ''}"
        ids = [chosen.randint(1, 200) for _ in range(chosen.randint(1, 9))]
        reason = "length" if chosen.random() < 0.3 else "stop"
        if reason == "stop":
            ids.append(END)
        return SimpleNamespace(token_ids=ids, text=turn, finish_reason=reason)

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = templated(TEMPLATE)
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: made
    )
    return made


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch) -> transformers.LlamaConfig:
    made = transformers.LlamaConfig()
    monkeypatch.setattr(
        transformers.AutoConfig, "from_pretrained", lambda *_, **__: made
    )
    return made


@pytest.fixture
def run(tmp_path: Path) -> Factory:
    """run(name, engine, until, **options): the chats of a file after `ppd data`."""

    def write_file(
        name: str = "a.jsonl",
        engine: FakeEngine | None = None,
        until: float = math.inf,
        **changes: Any,
    ) -> list[dict[str, Any]]:
        path = tmp_path / name
        options = DataOptions(
            **{"model": "any", "out": str(path), "batch_size": 7, **changes}
        )
        file = write_chats(options, lambda _: engine or FakeEngine(), until)
        chats = read(path)
        assert file.count == len(chats)
        return chats

    return write_file


@pytest.fixture
def prompts(tmp_path: Path) -> tuple[str]:
    records = [{"prompt_token_ids": [i + 1, 5]} for i in range(40)]
    return (write(tmp_path / "prompts.jsonl", *records),)


def test_answers_are_in_the_prompts_order(
    run: Factory,
    prompts: tuple[str],
) -> None:
    engine = FakeEngine()
    chats = run(engine=engine, prompts=prompts)
    assert [chat["prompt_token_ids"] for chat in chats] == [
        [i + 1, 5] for i in range(40)
    ]
    assert {chat["finish_reason"] for chat in chats} == {"stop", "length"}
    for chat in chats:
        assert (chat["token_ids"][-1] == END) == (chat["finish_reason"] == "stop")
    seeds = [seeds for _, seeds, _ in engine.batches]
    assert len(set(itertools.chain(*seeds))) == 40
    assert max(map(len, seeds)) == 7
    assert engine.batches[0][2] == Sampling(0.8, 0.95, 512)


@pytest.mark.parametrize(
    ("has_prompts", "fewer", "number"), [(True, 25, 30), (False, 10, 12)]
)
def test_a_run_that_is_killed_continues_to_the_same_file(
    run: Factory,
    prompts: tuple[str],
    tmp_path: Path,
    has_prompts: bool,
    fewer: int,
    number: int,
) -> None:
    """After batches, and within a line; and a file can be extended."""
    killed = tmp_path / "killed.jsonl"
    run = partial(run, prompts=prompts if has_prompts else ())
    whole = run("whole.jsonl", num_chats=number)
    for stop_before in (2, 1):
        with pytest.raises(KeyboardInterrupt):
            run(killed.name, FakeEngine(stop_before), num_chats=number)
        with killed.open("ab") as file:
            file.write(b'{"prompt_token_ids": [1')
    assert len(run(killed.name, num_chats=fewer)) >= fewer
    assert run(killed.name, num_chats=number) == whole


def test_user_turns_are_filtered_and_written_once(
    run: Factory,
    tokenizer: Any,
) -> None:
    turns = set()
    for chat in run(num_chats=15):
        text = tokenizer.decode(chat["prompt_token_ids"])
        assert text.endswith("<|end|>\n<assistant>")
        turn = text.split("<user>")[1].split("<|end|>")[0]
        assert turn and turn == turn.strip() and "\ufffd" not in turn
        turns.add(turn)
    assert len(turns) == 15


def test_a_time_limit_ends_after_a_batch(
    run: Factory,
    tokenizer: Any,
) -> None:
    """Without a chat template, of whole texts."""
    tokenizer.chat_template = None
    chats = run(until=time.monotonic())
    assert [chat["prompt_token_ids"] for chat in chats] == [[END]] * 7


def test_chats_fit_the_model(
    run: Factory, prompts: tuple[str], config: transformers.LlamaConfig
) -> None:
    config.max_position_embeddings = 2
    with pytest.raises(TrainingError, match="a prompt of at most 1 tokens"):
        run(prompts=prompts)


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (
            TEMPLATE,
            {"num_chats": 500},
            "user turns are too long, empty or repeated; pass",
        ),
        (
            "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
            {},
            "--model: the chat template changes what the user writes; pass --prompts",
        ),
        (
            None,
            {},
            "--model: the tokenizer has no chat template, .*; pass --prompts",
        ),
        (
            None,
            {"max_model_len": 2},
            "--prompts: no record has a prompt of at most 1 tokens",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(
    run: Factory,
    tokenizer: Any,
    prompts: tuple[str],
    monkeypatch: pytest.MonkeyPatch,
    template: str | None,
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(generation, "MOST_REFUSED", 60)
    tokenizer.chat_template = template
    if not template:
        tokenizer.bos_token = tokenizer.eos_token = None
    if "max_model_len" in options:
        options = options | {"prompts": prompts}
    with pytest.raises(TrainingError, match=message):
        run(**options)


def test_files_of_other_options_and_damaged_ones(
    run: Factory,
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"
    run(num_chats=5)
    assert len(run(num_chats=9, batch_size=1)) == 9
    message = r"was written with temperature=0\.8, but this run has 0\.5"
    with pytest.raises(TrainingError, match=message):
        run(temperature=0.5)
    path.write_bytes(path.read_bytes().replace(b'"index"', b'"what"', 1))
    with pytest.raises(
        TrainingError, match=r"a\.jsonl:1 is damaged; delete this line"
    ):
        run()
    write(tmp_path / "b.jsonl", {"text": "mine"})
    message = "was not written by `ppd data`; use another file"
    with pytest.raises(TrainingError, match=message):
        run("b.jsonl")


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
    run: Factory,
    tokenizer: Any,
    template: str,
    system: str | None,
    prefix: str,
    stop: list[str] | None,
) -> None:
    tokenizer.chat_template = template
    engine = FakeEngine()
    run(engine=engine, system=system, num_chats=1)
    (prompt, *_), _, sampling = engine.batches[0]
    assert tokenizer.decode(prompt) == prefix
    assert (sampling.stop_token_ids, sampling.stop) == ([END], stop)


def test_prompts_of_records(
    run: Factory,
    tmp_path: Path,
    tokenizer: Any,
) -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    path = write(
        tmp_path / "records.jsonl",
        {"messages": chat},
        {"prompt": "one ", "response": "two"},
        {"text": "abcdefghijklmnopqrstuvwxyz"},
    )
    chats = run(prompts=(path,), prompt_tokens=4, max_model_len=60)
    asked = tokenizer.apply_chat_template(
        chat[:1], tokenize=False, add_generation_prompt=True
    )
    texts = (asked, "one ", "abcd", "qrst")
    for chat, text in zip(chats, texts, strict=True):
        assert tokenizer.decode(chat["prompt_token_ids"]) == text

# SPDX-License-Identifier: Apache-2.0
"""One reader of users' data: every command takes the same forms, and refuses the same ones with the same line."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from records import templated, write

from vllm_ppd.heads.calibration.text import record_prompts, take_prompts
from vllm_ppd.heads.data.check import check_data
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.generation.options import DataOptions
from vllm_ppd.heads.generation.prompts import read_prompts as data_prompts
from vllm_ppd.heads.training.tokens import TokenStore

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION, ANSWER = "what is it like", "like nothing else"
CHAT = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
IDS = list(range(40, 52))
ASKED = f"<user>{QUESTION}<assistant>"
FORMS = {  # a record, and the prompt that it asks for (None: a text, of which prompts are pieces)
    "messages": ({"messages": CHAT}, ASKED),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]}, ASKED,
    ),
    "prompt": ({"prompt": QUESTION}, QUESTION),
    "prompt of messages": ({"prompt": CHAT[:1]}, ASKED),
    "prompt and completion": ({"prompt": QUESTION, "completion": ANSWER}, QUESTION),
    "token ids": ({"prompt_token_ids": IDS}, IDS),
    "text": ({"text": f"{QUESTION} {ANSWER}"}, None),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return templated(TEMPLATE)


@pytest.fixture(autouse=True)
def loaded(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: tokenizer)


def of_train(path: str, tokenizer: Any) -> list[list[int]]:
    store = TokenStore(Path(path).parent / "work", [path], tokenizer, tiny.VOCAB, 0.3, 16, train_on_prompts=True)
    return [ids.tolist() for ids in store.documents()]


def of_calibrate(path: str, tokenizer: Any) -> list[list[int]]:
    target: Any = SimpleNamespace(tokenizer=tokenizer, vocab_size=tiny.VOCAB, device="cpu")
    asked = record_prompts([path], target, 3, 90)
    return take_prompts([path], target, 3, 5).tolist() if asked is None else asked.ids.tolist()


def of_data(path: str, tokenizer: Any) -> list[list[int]]:
    return list(data_prompts(DataOptions(model="any", out="-", prompts=(path,), prompt_tokens=5), tokenizer))


READERS: dict[str, Callable[[str, Any], list[list[int]]]] = {
    "train": of_train, "calibrate": of_calibrate, "data": of_data,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("command", READERS)
def test_every_command_takes_every_form(tmp_path: Path, tokenizer: Any, command: str, form: str) -> None:
    record, asked = FORMS[form]
    path = write(tmp_path / "data.jsonl", *[record] * 60)
    check_data([path], prompts=60)
    prompts = READERS[command](path, tokenizer)
    assert prompts and all(prompts)
    if command == "train" and form != "token ids":  # it reads a record's whole text
        assert all(QUESTION in tokenizer.decode(ids) for ids in prompts)
    elif asked is not None:
        wanted = tokenizer(asked)["input_ids"] if isinstance(asked, str) else asked
        assert all(ids[: len(wanted)] == wanted for ids in prompts)
        assert command == "train" or {len(ids) for ids in prompts} == {len(wanted)}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [{"role": "user"}]}, "'messages' must be a list of objects with 'role' and 'content' strings"),
        ({"conversations": [["hi"]]}, "'conversations' must be a list of objects with 'role' and 'content' strings"),
        ({"prompt": 3}, "'prompt' is of type int; it must be a string or a chat"),
        ({"text": 3}, "'text' is of type int; it must be a string"),
        ({"prompt_token_ids": [1, "a"]}, "no list of token ids under 'prompt_token_ids'"),
    ],
)
def test_every_command_refuses_a_record_with_the_same_line(
    tmp_path: Path, tokenizer: Any, record: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "data.jsonl", {"prompt_token_ids": IDS}, record)
    said = set()
    for read in (*READERS.values(), lambda path, _: check_data([path])):
        with pytest.raises(TrainingError) as caught:
            read(path, tokenizer)
        said.add(str(caught.value))
    (line,) = said
    assert line.endswith(f"data.jsonl:2: {message}") and len(line) <= 300


@pytest.mark.parametrize("command", READERS)
def test_a_skipped_record_is_told_in_one_line(
    tmp_path: Path, tokenizer: Any, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for form in ("text", "messages"):
        path = write(tmp_path / "data.jsonl", {"text": None}, *[FORMS[form][0]] * 60)
        capsys.readouterr()
        READERS[command](path, tokenizer)
        told = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
        assert len(told) == 1 and "the text is null" in told[0]

# SPDX-License-Identifier: Apache-2.0
"""Prompts of `ppd data`: what files ask, and how a user turn begins and ends after a chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
from records import TEMPLATE, templated

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.generation.options import DataOptions
from vllm_ppd.heads.generation.prompts import ChatTemplate, beginning, read_prompts

END = 0


def options(**changes: Any) -> DataOptions:
    return DataOptions(**{"model": "any", "out": "-", **changes})


@pytest.mark.parametrize(
    ("template", "prefix", "stop_ids", "stop_text"),
    [
        (TEMPLATE, "<system>be<|end|><user>", (END,), None),
        ("{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}", "[INST] ", (END,), "[/INST]"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}a:", "user: ", (END,), "a:"),
    ],
)
def test_a_user_turn_begins_and_ends_as_in_the_template(
    template: str, prefix: str, stop_ids: tuple[int, ...], stop_text: str | None
) -> None:
    words = templated(template)
    turn = ChatTemplate(words, None).user_turn()
    assert (words.decode(turn.prefix), turn.stop_ids, turn.stop_text) == (prefix, stop_ids, stop_text)


def test_system_prompts(tmp_path: Path) -> None:
    words = templated(TEMPLATE)
    assert words.decode(ChatTemplate(words, "do").user_turn().prefix) == "<system>do<|end|>\n<user>"
    path = tmp_path / "a.jsonl"
    user = {"role": "user", "content": "hi"}
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in ([user], [{**user, "role": "system"}, user])))
    prompts = [words.decode(ids) for ids in read_prompts(options(prompts=(str(path),), system="do"), words)]
    assert prompts == [f"<system>{s}<|end|>\n<user>hi<|end|>\n<assistant>" for s in ("do", "hi")]


@pytest.mark.parametrize("template", ["", "{% for m in messages %}{{ m.content | upper }}{% endfor %}"])
def test_templates_without_user_turns(template: str) -> None:
    with pytest.raises(TrainingError, match=r"^--model: .* give --prompts"):
        ChatTemplate(templated(template), None).user_turn()


def test_texts_begin_with_the_token_that_begins_one_or_ends_the_one_before() -> None:
    words = templated(None)
    words.bos_token = None
    assert beginning(words) == [words.eos_token_id]
    words.eos_token = None
    with pytest.raises(TrainingError, match=r"^--model: .* give --prompts"):
        beginning(words)


def test_prompts_of_every_kind_of_record(tmp_path: Path) -> None:
    words = templated(TEMPLATE)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    records = [
        {"messages": [*chat, chat[1]]},
        {"prompt": "one ", "completion": "two"},
        {"prompt_token_ids": [7, 8], "token_ids": [9]},
        {"prompt_token_ids": [3] * 60},
        {"text": "abcdefghijklmnopqrstuvwxyz"},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    prompts = list(read_prompts(options(prompts=(str(path),), prompt_tokens=4, max_length=60), words))
    asked = words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = [words(text, add_special_tokens=False)["input_ids"] for text in (asked, "one ")]
    texts = [words(text)["input_ids"] for text in ("abcd", "qrst")]
    assert prompts == [*expected, [7, 8], *texts]
    path.write_text(json.dumps({"prompt_token_ids": [3] * 60}))
    with pytest.raises(TrainingError, match="--prompts: no record has a prompt of at most 59 tokens"):
        list(read_prompts(options(prompts=(str(path),), max_length=60), words))

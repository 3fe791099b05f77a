# SPDX-License-Identifier: Apache-2.0
"""Answers are packed without their prompts, and come back with those that are there."""

import json

import pytest

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.models.answers import PackOptions, UnpackOptions, pack, unpack


@pytest.fixture
def tokenizer(monkeypatch):
    """Of a model with a template that is the last message alone, a token a character."""

    class Tokenizer:
        def apply_chat_template(self, messages, **_):
            return {"input_ids": [ord(letter) for letter in messages[-1]["content"]]}

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: Tokenizer())


def test_answers_come_back_with_the_prompts_that_are_there(tmp_path, tokenizer):
    prompts, packed, back = (str(tmp_path / name) for name in ("prompts.jsonl", "answers.jsonl.xz", "back.jsonl"))
    asked = [{"messages": [{"role": "user", "content": text}]} for text in ("one", "two", "three")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in asked[1:]))
    chats = [
        {"prompt_token_ids": [ord(c) for c in text], "token_ids": ids, "finish_reason": "stop", "index": index}
        for index, text, ids in [(2, "three", [7, 8]), (0, "one", [9]), (1, "two", [])]
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    pack(PackOptions(answers=str(tmp_path / "chats.jsonl"), out=packed))
    unpack(UnpackOptions(answers=packed, prompts=prompts, model="M", out=back))
    expected = [{**chat, "index": index} for index, chat in enumerate(chats) if index != 1]
    assert [json.loads(line) for line in (tmp_path / "back.jsonl").read_text().splitlines()] == expected


def test_answers_to_none_of_the_prompts_are_refused(tmp_path, tokenizer):
    chat = {"prompt_token_ids": [1], "token_ids": [1], "finish_reason": "stop", "index": 0}
    (tmp_path / "a.jsonl").write_text(json.dumps(chat) + "\n")
    (tmp_path / "q.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "b"}]}) + "\n")
    packed = str(tmp_path / "a.xz")
    pack(PackOptions(answers=str(tmp_path / "a.jsonl"), out=packed))
    options = UnpackOptions(answers=packed, prompts=str(tmp_path / "q.jsonl"), model="M", out=str(tmp_path / "b.jsonl"))
    with pytest.raises(BenchError, match="none of the prompts"):
        unpack(options)
    assert not (tmp_path / "b.jsonl").exists()

# SPDX-License-Identifier: Apache-2.0
"""Answers that are kept without their prompts come back with those that are there."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.models.answers import UnpackOptions, digest, unpack


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.fixture
def unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """unpacked(answers, prompts): the chats; the model's template is the last message alone, a token a character."""

    class Tokenizer:
        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
            return {"input_ids": ids(messages[-1]["content"])}

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: Tokenizer())

    def run(answers: list[tuple[str, list[int]]], prompts: list[str]) -> list[dict[str, Any]]:
        packed, asked, out = tmp_path / "answers.jsonl.xz", tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
        with lzma.open(packed, "wt") as lines:
            for prompt, answer in answers:
                lines.write(json.dumps({"prompt": digest(ids(prompt)), "token_ids": answer, "end": "stop"}) + "\n")
        chats = [{"messages": [{"role": "user", "content": text}]} for text in prompts]
        asked.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        unpack(UnpackOptions(answers=str(packed), prompts=str(asked), model="M", out=str(out)))
        return [json.loads(line) for line in out.read_text().splitlines()]

    return run


def test_answers_come_back_with_the_prompts_that_are_there(unpacked: Any) -> None:
    assert unpacked([("three", [7, 8]), ("one", [9]), ("two", [])], ["two", "three"]) == [
        {"prompt_token_ids": ids("three"), "token_ids": [7, 8], "finish_reason": "stop", "index": 0},
        {"prompt_token_ids": ids("two"), "token_ids": [], "finish_reason": "stop", "index": 2},
    ]


def test_answers_to_none_of_the_prompts_are_refused(unpacked: Any, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="none of the prompts"):
        unpacked([("a", [1])], ["b"])
    assert not (tmp_path / "out.jsonl").exists()

# SPDX-License-Identifier: Apache-2.0
"""Prompts of `ppd bench acceptance`: chats, token ids and categories, shortest first."""

import json
from pathlib import Path
from typing import Any

import pytest
from records import templated

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.acceptance.options import AcceptanceOptions
from vllm_ppd.benchmarks.acceptance.prompts import Task, task_of

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    tokenizer = templated(TEMPLATE)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: tokenizer)
    return tokenizer


def read(path: Path, records: list[dict[str, Any]], most: int = 9) -> Task:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return task_of(AcceptanceOptions(model="any", data=(f"chats={path}",), prompts=most, prompt_tokens=40))


def chat(text: str, *more: str, **columns: Any) -> dict[str, Any]:
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate((text, *more))]
    return {"messages": turns, **columns}


def test_chats_go_through_the_template(tokenizer: Any, tmp_path: Path) -> None:
    share_gpt = {"conversations": [{"from": "human", "value": "hey"}, {"from": "gpt", "value": "answer"}]}
    task = read(tmp_path / "a.jsonl", [chat("hello"), chat("a", "answer"), {"prompt_token_ids": [5, 6]}, share_gpt])
    ((_, prompts),) = task.batches(9)
    decoded = [tokenizer.decode(ids) for ids in prompts]
    assert decoded[1:] == ["<user>a<a>", "<user>hey<a>", "<user>hello<a>"] and prompts[0] == [5, 6]


def test_categories_take_turns(tokenizer: Any, tmp_path: Path) -> None:
    records = [chat("x" * n, category=name) for name, n in (("qa", 1), ("qa", 2), ("qa", 3), ("rag", 9), ("rag", 99))]
    task = read(tmp_path / "a.jsonl", records, most=3)
    lengths = {name: [tokenizer.decode(ids).count("x") for ids in prompts] for name, prompts in task.prompts.items()}
    assert lengths == {"qa": [1, 2], "rag": [9]} and task.left_out == 1
    assert [(name, len(batch)) for name, batch in task.batches(1)] == [("qa", 1), ("qa", 1), ("rag", 1)]
    with pytest.raises(BenchError, match="none of 1 prompts has up to 40 tokens; give more --prompt-tokens"):
        read(tmp_path / "a.jsonl", records[-1:])

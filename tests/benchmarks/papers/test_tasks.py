# SPDX-License-Identifier: Apache-2.0
"""Tasks of `ppd bench tables`: chats and token ids, categories, and texts after prompts of unequal length."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.estimates import bootstrap
from vllm_ppd.benchmarks.papers.table import rises
from vllm_ppd.benchmarks.papers.tasks import Task, answers, read_task
from vllm_ppd.heads.calibration.text import generate
from vllm_ppd.heads.training.target import Target

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Path]) -> Target:
    target = Target(str(tiny_model()), torch.device("cpu"), torch.float32)
    target.tokenizer.chat_template = TEMPLATE
    return target


def task_of(target: Target, path: Path, records: list[dict[str, Any]], most: int = 9) -> Task:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_task(f"chats={path}", target, most, 40, 8)


def chat(text: str, *more: str, **columns: Any) -> dict[str, Any]:
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate((text, *more))]
    return {"messages": turns, **columns}


def test_chats_go_through_the_template(target: Target, tmp_path: Path) -> None:
    share_gpt = {"conversations": [{"from": "human", "value": "hey"}, {"from": "gpt", "value": "answer"}]}
    records = [chat("hello"), chat("a", "answer"), {"prompt_token_ids": [5, 6]}, share_gpt]
    task = task_of(target, tmp_path / "a.jsonl", records)
    decoded = [target.tokenizer.decode(ids) for ids in task.prompts]
    assert decoded[1:] == ["<user>a<a>", "<user>hey<a>", "<user>hello<a>"] and task.prompts[0] == [5, 6]
    assert not task.texts


def test_categories_take_turns(target: Target, tmp_path: Path) -> None:
    records = [chat("x" * n, category=name) for name, n in (("qa", 1), ("qa", 2), ("qa", 3), ("rag", 9), ("rag", 99))]
    task = task_of(target, tmp_path / "a.jsonl", records, most=3)
    assert [target.tokenizer.decode(ids).count("x") for ids in task.prompts] == [1, 2, 9] and task.left_out == 1
    with pytest.raises(BenchError, match="--task chats: none of 1 prompts has up to 40 tokens; give more --longest"):
        task_of(target, tmp_path / "a.jsonl", records[-1:])


def test_padding_changes_nothing(target: Target) -> None:
    """What is read along texts after padded prompts is what is read after each prompt alone."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, tiny.VOCAB, (n,), generator=generator).tolist() for n in (3, 7, 20)]
    ids, starts = Task("t", "", prompts).padded(target.device)
    texts = generate(target, ids, 6, batch=2, starts=starts)
    (_, windows), (_, second) = texts.batches(2)
    assert windows.input_ids.shape == (2, 12) and second.input_ids.shape == (1, 25)  # no longer than they must be
    states = texts.reading(target.run(windows).final, windows).unflatten(0, (2, 6))
    tokens, valid = answers(texts, 2)[0].ahead(2)
    for row in range(2):
        alone = generate(target, torch.tensor([prompts[row]]), 6)
        ((_, window),) = alone.batches(1)
        torch.testing.assert_close(states[row], alone.reading(target.run(window).final, window), atol=1e-4, rtol=1e-4)
        counted = tokens.view(2, -1, 2)[row][valid.view(2, -1)[row]].tolist()
        answer = alone.generated[0, : int(alone.lengths[0])].tolist()
        assert counted == [answer[i : i + 2] for i in range(len(answer) - 1)]


def test_intervals_decide_what_texts_allow() -> None:
    hits, tokens = torch.tensor([9, 8, 9, 10] * 8), torch.full((32,), 10)
    interval = bootstrap(lambda a, n: a / n - 0.5, hits, tokens)
    assert interval.value == pytest.approx(0.4) and interval.low < 0.4 < interval.high and interval.above() is True
    assert bootstrap(lambda a, n: a / n - 0.9, hits, tokens).above() is None
    assert interval.above(0.9) is False
    verdict = rises("It rises", "here", interval)
    assert verdict.holds is True and verdict.evidence.startswith("here: +0.400 (")

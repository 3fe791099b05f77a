# SPDX-License-Identifier: Apache-2.0
"""`ppd bench serve --chats`: prompts of files as those of Spec-Bench and GSM8K."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from tokenizers import processors
from transformers import AutoTokenizer

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.serve.chats import Chats
from vllm_ppd.benchmarks.serve.options import ServeOptions

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    tokenizer.chat_template = TEMPLATE
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.save_pretrained(folder)
    return folder


def data_of(folder: Path) -> tuple[str, ...]:
    """As the two sets have them: a category and an id, an answer beside the chat, several turns, one too long."""
    chats: list[dict[str, Any]] = [
        {"id": i, "category": "writing", "messages": [{"role": "user", "content": f"question {i}? " + "why " * 5}]}
        for i in range(6)
    ]
    turns = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "reply"},
             {"role": "user", "content": "second"}, {"role": "assistant", "content": "the known answer"}]  # fmt: skip
    chats += [{"messages": turns, "answer": "18"}, {"messages": [{"role": "user", "content": "long " * 100}]}]
    half = len(chats) // 2
    files = []
    for name, rows in (("spec_bench", chats[:half]), ("gsm8k", chats[half:])):
        files.append(folder / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tuple(map(str, files))


def options(tokenizer: str, data: tuple[str, ...], **more: Any) -> ServeOptions:
    given: dict[str, Any] = {"model": tokenizer, "data": data, "chats": True, "context": 256, "shared_tokens": 1}
    return ServeOptions(**given | {"new_tokens": 16, "requests": 5} | more)


def test_prompts_are_the_chats(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = Chats(options(tokenizer, data_of(tmp_path)))
    assert "1 of 8 chats are longer than half of --context, left out" in capsys.readouterr().out
    assert len(chats.prompts) == 7
    assert chats.prompts[0] == f"{tiny.END}[user] question 0? why why why why why \n[assistant]"
    assert chats.prompts[6] == f"{tiny.END}[user] first\n[assistant] reply\n[user] second\n[assistant]"
    first, again, other = chats.requests(1), chats.requests(1), chats.requests(2)
    assert first == again != other
    assert len({request.prompt for request in first}) == 5, "no chat comes twice before all have come"
    assert all(8 <= len(chats.tokenizer(request.answer)["input_ids"]) <= 128 for request in first)
    many = Chats(options(tokenizer, data_of(tmp_path), requests=9)).requests(0)
    assert {request.prompt for request in many} == set(chats.prompts)


def test_beginning_that_the_server_adds_is_not_there_twice(tokenizer: str, tmp_path: Path) -> None:
    chats = Chats(options(tokenizer, data_of(tmp_path)))
    chats.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tiny.END} $A", special_tokens=[(tiny.END, 0)]
    )
    assert chats._bare(f"{tiny.END}[user] question") == "[user] question"


def test_texts_are_cut_to_half_of_the_context(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "a long text " * 100}) + "\n")
    chats = Chats(options(tokenizer, (str(tmp_path / "text.jsonl"),)))
    assert [len(chats.tokenizer(text)["input_ids"]) for text in chats.prompts] == [128]


def test_what_is_refused(tokenizer: str, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"none of 8 prompts has up to 32 tokens; give more --context"):
        Chats(options(tokenizer, data_of(tmp_path), context=64))

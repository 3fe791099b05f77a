# SPDX-License-Identifier: Apache-2.0
"""Data of a fit: the prompts to answer, and the chats for training and for the figures at the end."""

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.data.files import records
from vllm_ppd.heads.data.prompts import document_prompts, in_turns
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.files import write_text
from vllm_ppd.heads.generation.prompts import STRIDE

SHIPPED = Path(__file__).with_name("prompts.jsonl")
PASSES = 4  # most answers to a prompt, each with its own seed
HELD_OUT = 8  # the first of each so many prompts is held out with all its answers
OTHERS = "self-written"  # category of texts that the model begins itself
HALF = 128  # most tokens of a held-out text that form its prompt; at most half of it


def write_prompts(files: tuple[str, ...], tokenizer: Any, longest: int, out: Path) -> list[str]:
    """Write the prompts of files, or those of the package, as token ids, each PASSES times; returns their categories.

    Args:
        files: users' data; none for the package's.
        tokenizer: the target's.
        longest: tokens of a prompt at most.
        out: the file.

    Raises:
        TrainingError: on malformed files, or if no prompt is left.
    """
    if not files and not getattr(tokenizer, "chat_template", None):
        files = (str(out.with_suffix(".txt.jsonl")),)
        asked = ((record["messages"][0]["content"], record["category"]) for _, record in records(SHIPPED))
        _write(Path(files[0]), ({"prompt": text + "\n", "category": category} for text, category in asked))
    documents = Documents(files or (SHIPPED,), lambda: tokenizer, report=False)
    prompts = [
        {"prompt_token_ids": ids, "category": document.category}
        for document in document_prompts(documents, 64, STRIDE)
        for ids in document.ids if 0 < len(ids) <= longest
    ]  # fmt: skip
    if not prompts:
        raise TrainingError(f"--prompts: no record has a prompt of at most {longest} tokens; give shorter prompts")
    _write(out, itertools.chain.from_iterable(itertools.repeat(prompts, PASSES)))
    return [str(prompt["category"]) for prompt in prompts]


def split(files: list[Path], categories: list[str], longest: int, folder: Path) -> dict[str, int]:
    """Write training.jsonl and held-out.jsonl, which share no prompt.

    Args:
        files: of answers to the prompts, and of chats that the model began itself, if any.
        categories: of the prompts.
        longest: tokens of a held-out prompt at most.
        folder: for the files.

    Returns:
        Numbers of training chats, their tokens, and held-out chats.
    """
    training: list[dict[str, Any]] = []
    held_out: dict[str, list[dict[str, Any]]] = {}
    for path, count in zip(files, (len(categories), 0), strict=False):
        for _, chat in records(path):
            number = chat["index"] % count if count else chat["index"]
            if number % HELD_OUT:
                training.append(chat)
            elif number == chat["index"]:  # one answer per prompt
                category = categories[number] if count else OTHERS
                held_out.setdefault(category, []).append(_asked(chat) | {"category": category})
    kept = [chat for chat in in_turns(held_out.values()) if len(chat["prompt_token_ids"]) <= longest]
    _write(folder / "held-out.jsonl", kept)
    _write(folder / "training.jsonl", training)
    tokens = sum(len(chat["prompt_token_ids"]) + len(chat["token_ids"]) for chat in training)
    return {"training": len(training), "tokens": tokens, "held_out": len(kept)}


def _asked(chat: Mapping[str, Any]) -> dict[str, Any]:
    """A held-out chat; a whole text is split into a prompt and its continuation, as all have one prompt."""
    prompt, response = chat["prompt_token_ids"], chat["token_ids"]
    if len(prompt) == 1:
        half = min(HALF, len(response) // 2)
        prompt, response = prompt + response[:half], response[half:]
    return {"prompt_token_ids": prompt, "token_ids": response}


def _write(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))

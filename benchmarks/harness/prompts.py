# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids, from text, chats or token ids."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.heads.training.corpus import JSON_SUFFIXES, documents, expand

STRIDE = 4  # prompts' lengths from one prompt to the next in a long document: what they lead to should differ
SHORTEST = 4  # tokens


def read_prompts(
    data: tuple[str, ...], model: str, longest: int, count: int, trust_remote_code: bool
) -> list[list[int]]:
    """At most count prompts: one a document, then a second of each that is long enough, and so on.

    Args:
        data: .jsonl files with prompt_token_ids, text or messages a line, plain text, or folders of them.
        model: whose tokenizer reads text.
        longest: tokens of a prompt at most; longer documents are cut.
        count: prompts wanted.
        trust_remote_code: run a tokenizer's own code.

    Raises:
        BenchError, TrainingError: if a file is missing or malformed, or holds no prompt.
    """
    pieces = []
    for ids in itertools.islice(token_ids(data, model, trust_remote_code), count):
        starts = list(range(0, max(1, len(ids) - longest + 1), STRIDE * longest))
        middle = len(starts) // 2  # the beginnings of documents resemble each other
        pieces.append([ids[start : start + longest] for start in starts[middle:] + starts[:middle]])
    rows = itertools.zip_longest(*pieces)
    found = [ids for row in rows for ids in row if ids is not None and len(ids) >= min(SHORTEST, longest)][:count]
    if not found:
        raise BenchError(f"{', '.join(data)}: no document has {min(SHORTEST, longest)} tokens; give longer prompts")
    return found


def token_ids(data: tuple[str, ...], model: str, trust_remote_code: bool) -> Iterator[list[int]]:
    """The token ids of every document, in order."""
    tokenizer: Any = None
    for file in expand(data):
        if file.suffix in JSON_SUFFIXES and '"prompt_token_ids":' in _first_line(file):
            yield from _given_ids(file)
            continue
        if tokenizer is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
        for text in documents([file], tokenizer):
            yield tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _first_line(file: Path) -> str:
    with file.open(encoding="utf-8", errors="replace") as handle:
        return handle.readline()


def _given_ids(file: Path) -> Iterator[list[int]]:
    with file.open(encoding="utf-8") as handle:
        for number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            try:
                ids = json.loads(line)["prompt_token_ids"]
            except (ValueError, KeyError, TypeError):
                ids = None
            if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
                raise BenchError(f"{file}:{number}: no list of token ids under 'prompt_token_ids'")
            yield ids

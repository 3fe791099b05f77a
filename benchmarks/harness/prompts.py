# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids, from text, chats or token ids."""

from __future__ import annotations

import itertools
from typing import Any

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.heads.data.documents import Documents

STRIDE = 4  # prompts' lengths from one prompt to the next in a long document: what they lead to should differ
SHORTEST = 4  # tokens


def read_prompts(
    data: tuple[str, ...], model: str, longest: int, count: int, trust_remote_code: bool
) -> list[list[int]]:
    """At most count prompts: one a document, then a second of each that is long enough, and so on.

    Each begins with the special tokens that vLLM's server would put there.

    Args:
        data: .jsonl or .json files of prompt_token_ids, text or chats, plain text, or folders of them.
        model: whose tokenizer reads text.
        longest: tokens of a prompt at most; longer documents are cut.
        count: prompts wanted.
        trust_remote_code: run a tokenizer's own code.

    Raises:
        BenchError, TrainingError: if a file is missing or malformed, or holds no prompt.
    """
    pieces = []
    documents = read_documents(data, model, trust_remote_code)
    for ids in itertools.islice(documents.token_ids(), count):
        prompts = documents.special.pieces(ids, longest, STRIDE, shorter=True)
        middle = len(prompts) // 2  # the beginnings of documents resemble each other
        pieces.append(prompts[middle:] + prompts[:middle])
    rows = itertools.zip_longest(*pieces)
    found = [ids for row in rows for ids in row if ids is not None and len(ids) >= min(SHORTEST, longest)][:count]
    if not found:
        raise BenchError(f"{', '.join(data)}: no document has {min(SHORTEST, longest)} tokens; give longer prompts")
    return found


def read_documents(data: tuple[str, ...], model: str, trust_remote_code: bool) -> Documents:
    """The documents of the data; the model's tokenizer is loaded when one of them is not token ids already."""

    def load() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)

    return Documents(data, load)

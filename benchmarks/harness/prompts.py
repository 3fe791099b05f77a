# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids, from text, chats or token ids."""

from __future__ import annotations

import itertools
from typing import Any

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.data.prompts import from_the_middle, in_turns

STRIDE = 4  # prompts' lengths from one prompt to the next in a long document: what they lead to should differ
SHORTEST = 4  # tokens


def read_prompts(
    data: tuple[str, ...], model: str, longest: int, count: int | None, trust_remote_code: bool
) -> list[list[int]]:
    """At most count prompts: one a document, then a second of each that is long enough, and so on.

    Each begins with the special tokens that vLLM's server would put there.

    Args:
        data: .jsonl or .json files of prompt_token_ids, text or chats, plain text, or folders of them.
        model: whose tokenizer reads text; it is loaded when a document is not token ids already.
        longest: tokens of a prompt at most; longer documents are cut, and prompts that have a response left out.
        count: prompts wanted (None: all).
        trust_remote_code: run a tokenizer's own code.

    Raises:
        BenchError, TrainingError: if a file is missing or malformed, or holds no prompt.
    """

    def load() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)

    pieces, documents = [], Documents(data, load)
    for document in itertools.islice(documents.tokens(), count):
        if document.prompt_ids is not None and document.mask is not None:  # of `ppd data`
            prompts = [document.prompt_ids] if len(document.prompt_ids) <= longest else []
        else:
            prompts = documents.special.pieces(document.ids or [], longest, STRIDE, shorter=True)
        pieces.append(from_the_middle(prompts))
    found = [ids for ids in in_turns(pieces) if len(ids) >= min(SHORTEST, longest)][:count]
    if not found:
        raise BenchError(
            f"{', '.join(data)}: no document has {min(SHORTEST, longest)} tokens, or a prompt of up to {longest}; give "
            "longer documents, or more --prompt-tokens"
        )
    return found

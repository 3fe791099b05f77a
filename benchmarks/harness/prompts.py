# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids, from text, chats, prompts or token ids."""

import itertools
from typing import Any

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.data.prompts import document_prompts, from_the_middle, in_turns

STRIDE = 4  # distance between prompts in a long document, in prompt lengths: continuations should differ
SHORTEST = 4  # tokens


def load_tokenizer(name: str, trust_remote_code: bool) -> Any:
    """The tokenizer of a folder or a model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def read_prompts(
    data: tuple[str, ...], model: str, longest: int, count: int | None, trust_remote_code: bool
) -> list[list[int]]:
    """At most `count` prompts: one per document, then a second of each that is long enough, and so on.

    Each begins with the special tokens that vLLM's server would add. The prompt of a chat is all up to the user's
    last turn.

    Args:
        data: .jsonl or .json files of prompt_token_ids, prompts, chats or text, plain text, or folders of them.
        model: whose tokenizer is loaded if a document is not token ids already.
        longest: most tokens of a prompt; texts are cut, longer prompts and chats left out.
        count: prompts wanted (None: all).
        trust_remote_code: run a tokenizer's own code.

    Raises:
        BenchError, TrainingError: if a file is missing or malformed, or holds no prompt.
    """
    documents, rows = Documents(data, lambda: load_tokenizer(model, trust_remote_code)), []
    for prompts, is_asked, _ in itertools.islice(document_prompts(documents, longest, STRIDE, shorter=True), count):
        rows.append([ids for ids in prompts if len(ids) <= longest] if is_asked else from_the_middle(prompts))
    chosen = [ids for ids in in_turns(rows) if len(ids) >= min(SHORTEST, longest)][:count]
    if not chosen:
        raise BenchError(
            f"{', '.join(data)}: no document has {min(SHORTEST, longest)} tokens, or a prompt of up to {longest}; give "
            "longer documents, or more --prompt-tokens"
        )
    return chosen

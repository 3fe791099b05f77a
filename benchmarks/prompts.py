# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids, from users' data."""

from collections import Counter
from typing import NamedTuple

from vllm_ppd.benchmarks.storage import BenchError
from vllm_ppd.heads.data.documents import Documents, document_prompts

SHORTEST = 4  # tokens
# Distance between two pieces of a long text, in pieces: their continuations should
# differ
STRIDE = 4


class Prompt(NamedTuple):
    """Token ids with the special tokens of a server's prompt, and the record's category."""

    ids: list[int]
    category: str = ""


def read_prompts(
    data: tuple[str, ...],
    model: str,
    longest: int,
    trust_remote_code: bool = False,
) -> list[Prompt]:
    """The prompts of all records in files; of each category and each long text one
    after the other in turn.

    A text is cut into pieces of `longest` tokens. Other prompts that are longer are left
    out.

    Args:
        data: files of records, and folders.
        model: its tokenizer is loaded.
        longest: most tokens of a prompt.
        trust_remote_code: run a tokenizer's own code.

    Raises:
        BenchError, TrainingError: if a file is missing or malformed, or no prompt is
            left.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        model, trust_remote_code=trust_remote_code
    )
    turns: list[tuple[int, Prompt]] = []
    seen: Counter[str] = Counter()
    left_out = 0
    documents = Documents(data, tokenizer)
    for document, prompts in document_prompts(documents, longest, STRIDE):
        category = document.category
        # A text that is shorter than a piece is a prompt as a whole
        for number, ids in enumerate(prompts or [document.ids or []]):
            if SHORTEST <= len(ids) <= longest:
                # The first pieces of all texts come before the second ones
                turn = number
                if category:
                    turn += seen[category]
                turns.append((turn, Prompt(ids, category)))
            else:
                left_out += 1
        seen[category] += 1
    if not turns:
        raise BenchError(
            f"{', '.join(data)}: none of {left_out} prompts has {SHORTEST} to "
            f"{longest} tokens; give other data, or more --prompt-tokens"
        )
    return [prompt for _, prompt in sorted(turns, key=lambda turn: turn[0])]

# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids, from users' data."""

from collections import defaultdict
from typing import NamedTuple

from vllm_ppd.benchmarks.storage import BenchError
from vllm_ppd.heads.data.documents import Documents, document_prompts, in_turns

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
    rows: defaultdict[str | int, list[Prompt]] = defaultdict(list)
    too_long = 0
    documents = Documents(data, tokenizer)
    for number, (document, prompts) in enumerate(
        document_prompts(documents, longest, STRIDE)
    ):
        category = document.category
        # A text that is shorter than a piece is a prompt as a whole
        for ids in prompts or [document.ids or []]:
            too_long += len(ids) > longest
            if SHORTEST <= len(ids) <= longest:
                rows[category or number].append(Prompt(ids, category))
    if not rows:
        raise BenchError(
            f"{', '.join(data)}: no prompt has {SHORTEST} to {longest} tokens; pass "
            "other --data, or raise --prompt-tokens"
        )
    if too_long:
        print(
            f"{too_long} prompts are longer than --prompt-tokens {longest} and are left "
            "out"
        )
    return in_turns(rows.values())

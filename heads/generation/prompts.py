# SPDX-License-Identifier: Apache-2.0
"""Prompts of the files a user names, as token ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.data.prompts import document_prompts
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.generation.options import DataOptions

STRIDE = 4  # lengths from one prompt of a text to the next


def read_prompts(options: DataOptions, tokenizer: Any) -> Iterator[list[int]]:
    """Prompts in the files' order: of chats the turns up to the last user's, of prompts and token ids the whole, of
    texts stretches of --prompt-tokens. Those that leave no room for a response are left out.

    Raises:
        TrainingError: on a file or a record that is malformed, or if there is no prompt.
    """
    documents = Documents(options.prompts, lambda: tokenizer, system=options.system)
    number = 0
    for prompts in document_prompts(documents, options.prompt_tokens, STRIDE):
        for ids in prompts.ids:
            if ids and len(ids) < options.max_length:
                number += 1
                yield ids
    if not number:
        skips = f" ({documents.skips()})" if documents.skipped else ""
        raise TrainingError(
            f"--prompts: no record gives a prompt of at most {options.max_length - 1} tokens{skips}; give chats, "
            f"prompts, or texts of {options.prompt_tokens} tokens"
        )

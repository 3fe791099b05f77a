# SPDX-License-Identifier: Apache-2.0
"""A check of users' files that needs no tokenizer, so that bad data is refused before a
model loads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from vllm_ppd.heads.data.files import FORMS, expand, is_records, records
from vllm_ppd.heads.data.records import Skipped, parse_record
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.text import place

LOOKED_AT = 1024  # records of each file


def check_data(paths: Sequence[str | Path], prompts: int = 0) -> None:
    """Read the beginning of every file.

    Args:
        paths: files, and folders of them.
        prompts: how many prompts are needed, one from each record that asks for an
            answer.

    Raises:
        TrainingError: if a file is missing or malformed, if there is no text, or if
            there are fewer prompts. The message names the file.
    """
    if not paths:
        return
    files = expand(paths)
    readable = 0
    is_certain = True  # all records are read, and all of them ask
    reason = ""
    for file in files:
        # Only the first piece of plain text
        most = LOOKED_AT if is_records(file) else 1
        looked_at = list(itertools.islice(records(file), most))
        is_certain &= len(looked_at) < most
        for where, record in looked_at:
            try:
                is_certain &= parse_record(record, where).asks
                readable += 1
            except Skipped as skipped:
                reason = reason or f" ({where}: {skipped})"
    first = (
        place(files[0])
        if len(files) == 1
        else f"{place(files[0])} and {len(files) - 1} more"
    )
    if not readable:
        raise TrainingError(f"no text in {first}{reason}; {FORMS} with text")
    if is_certain and readable < prompts:
        raise TrainingError(
            f"{prompts} prompts are needed, but {first} have {readable}; give more "
            "data, or smaller --prompts"
        )

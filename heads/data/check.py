# SPDX-License-Identifier: Apache-2.0
"""A check of users' files that needs no tokenizer, so that bad data is refused before a model loads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from vllm_ppd.heads.data.files import expand, is_records, records
from vllm_ppd.heads.data.records import Skipped, parse_record
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.quote import place

LOOKED_AT = 1024  # records of each file
FORMS = "give .jsonl, .json or text files with text"


def check_data(paths: Sequence[str | Path], prompts: int = 0) -> None:
    """Read the beginning of every file.

    Args:
        paths: files, and folders of them.
        prompts: how many prompts are needed, one from each record that asks for an answer.

    Raises:
        TrainingError: if a file is missing, not regular, malformed or, named by itself, empty; if all files of a folder
            are; or if there are fewer prompts. The message names the file.
    """
    if not paths:
        return
    files, named = expand(paths), {path for path in map(Path, paths) if path.is_file()}
    readable, all_ask, all_read, reason = 0, True, True, ""
    for file in files:
        count, most = 0, LOOKED_AT if is_records(file) else 1  # only the first piece of plain text
        for where, record in itertools.islice(records(file), most):
            count += 1
            try:
                all_ask &= parse_record(record, where).asks
                readable += 1
            except Skipped as skipped:
                reason = reason or f" ({where}: {skipped})"
        all_read &= count < most
        if file in named and not count:
            raise TrainingError(f"data file {place(file)!r} is empty; {FORMS}")
    if not readable and all_read:
        subject = f"{place(files[0])} holds no" if len(files) == 1 else f"none of {len(files)} data files holds"
        raise TrainingError(f"{subject} text{reason}; {FORMS}")
    if all_read and all_ask and readable < prompts:
        raise TrainingError(
            f"{place(files[0])}{' and others hold' if len(files) > 1 else ' holds'} {readable} prompts, but "
            f"{prompts} are needed; give more data, or smaller --prompts"
        )

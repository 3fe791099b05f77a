# SPDX-License-Identifier: Apache-2.0
"""Files and records behind the paths that a user names."""

from __future__ import annotations

import glob
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_ppd.heads.data.records import Skipped, parse_record
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.text import LONGEST_VALUE, place, shortened

LOOKED_AT = 1024  # records of each file that are checked before a model loads
PIECE = 1 << 18  # characters of a plain text file that make one document
LINES = {".jsonl", ".ndjson"}
RECORDS = {*LINES, ".json"}
FORMS = "give .jsonl, .json or text files"


def expand(paths: Sequence[str | Path]) -> list[Path]:
    """The files behind paths, in order. A folder stands for every file in it that is
    not hidden.

    Raises:
        TrainingError: if a path does not exist, or a folder is empty.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            names = glob.glob(
                "**", root_dir=path, recursive=True
            )  # none is hidden
            inside = [
                file
                for file in sorted(map(path.joinpath, names))
                if file.is_file()
            ]
            if not inside:
                raise TrainingError(
                    f"data folder {place(path)!r} holds no files; {FORMS}"
                )
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            problem = (
                "is not a regular file" if path.exists() else "does not exist"
            )
            raise TrainingError(
                f"data file {place(path)!r} {problem}; {FORMS}, or folders of them"
            )
    return files


def check_data(paths: Sequence[str | Path]) -> None:
    """Read the beginning of every file. No tokenizer is needed, so bad data is refused
    before a model loads.

    Raises:
        TrainingError: if a file is missing or malformed, or if there is no text. The
            message names the file.
    """
    files = expand(paths)
    has_text = not files
    reason = ""
    for file in files:
        for where, record in itertools.islice(records(file), LOOKED_AT):
            try:
                parse_record(record, where)
            except Skipped as skipped:
                reason = reason or f" ({where}: {skipped})"
            else:
                has_text = True
            if file.suffix not in RECORDS:
                break  # one piece of plain text is enough
    if not has_text:
        names = ", ".join(map(place, files))
        raise TrainingError(f"no text in {names}{reason}; {FORMS} with text")


def records(file: Path) -> Iterator[tuple[str, Any]]:
    """(file and line, JSON value) of each record; of plain text (file, {"text":
    piece}).

    Raises:
        TrainingError: on what is not JSON or not UTF-8; the message names file and
            line.
    """
    if file.suffix in LINES:
        yield from _lines(file)
    elif file.suffix in RECORDS:
        yield from _array(file)
    else:
        yield from _pieces(file)


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            if line.strip():
                where = place(file, number)
                yield (
                    where,
                    _parsed(line, where, "each line must be one JSON object"),
                )


def _array(file: Path) -> Iterator[tuple[str, Any]]:
    text = file.read_bytes()
    if not text.strip():
        return
    values = _parsed(
        text, place(file), "a .json file must be an array of objects"
    )
    if not isinstance(values, list):
        values = [values]
    for number, value in enumerate(values, start=1):
        yield f"{place(file)}, record {number}", value


def _pieces(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open(encoding="utf-8-sig") as handle:
        try:
            while piece := handle.read(PIECE):
                # Up to the end of the line, if it is not too long
                piece += handle.readline(PIECE)
                yield place(file), {"text": piece}
        except UnicodeDecodeError:
            raise TrainingError(
                f"{place(file)} is not UTF-8 text; convert the file, unpack it, or "
                "leave it out"
            ) from None


def _parsed(text: bytes, where: str, needed: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = shortened(str(error), LONGEST_VALUE)
        raise TrainingError(f"{where} is not JSON ({reason}); {needed}") from None

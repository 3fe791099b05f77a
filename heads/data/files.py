# SPDX-License-Identifier: Apache-2.0
"""Files and records behind the paths that a user names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.quote import LONGEST_VALUE, place, shortened

PIECE = 1 << 18  # characters of a plain text file that make one document
LONGEST_RECORD = 1 << 26  # characters of a line; a longer one is a mistake
LARGEST_JSON = 1 << 32  # bytes of a .json file, which is read whole
LINES_SUFFIXES = {".jsonl", ".ndjson"}
JSON_SUFFIX = ".json"
BLANK = " \t\r\n\ufeff"  # concatenated files keep their byte-order marks
SPACE = re.compile(f"[{BLANK}]*")
NO_TEXT = re.compile("[\0\ud800-\udfff]")  # NUL, and bytes that were not UTF-8


def expand(paths: Sequence[str | Path]) -> list[Path]:
    """The files behind paths, in order; a folder means every file in it that is not hidden.

    Raises:
        TrainingError: if a path does not exist, or a folder is empty.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(
                file for file in path.rglob("*")
                if file.is_file() and not any(name.startswith(".") for name in file.relative_to(path).parts)
            )  # fmt: skip
            if not inside:
                raise TrainingError(f"data folder {place(path)!r} holds no files; give .jsonl, .json or text files")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            problem = "is not a regular file" if path.exists() else "does not exist"
            raise TrainingError(
                f"data file {place(path)!r} {problem}; give .jsonl, .json or text files, or folders of them"
            )
    return files


def is_records(file: Path) -> bool:
    """Whether a file holds records; others are plain text."""
    return file.suffix in LINES_SUFFIXES or file.suffix == JSON_SUFFIX


def records(file: Path) -> Iterator[tuple[str, Any]]:
    """(file and line, JSON value) of each record; of plain text (file, {"text": piece}).

    Raises:
        TrainingError: on what is not JSON, not UTF-8 or too long; names file and line.
    """
    # Bytes that are not UTF-8 become lone surrogates, which _checked rejects, naming their line.
    with file.open(encoding="utf-8-sig", errors="surrogateescape") as handle:
        if file.suffix in LINES_SUFFIXES:
            for number, line in enumerate(iter(lambda: handle.readline(LONGEST_RECORD + 1), ""), start=1):
                where = place(file, number)
                if len(line) > LONGEST_RECORD:
                    raise TrainingError(f"{where} is longer than {LONGEST_RECORD:,} characters; split it")
                if text := _checked(line, file, number).strip(BLANK):
                    yield where, _parse_line(text, where)
        elif file.suffix == JSON_SUFFIX:
            if file.stat().st_size > LARGEST_JSON:
                raise TrainingError(f"{place(file)} is larger than {LARGEST_JSON >> 30} GiB; convert it to .jsonl")
            for number, value in enumerate(_parse_file(_checked(handle.read(), file), file), start=1):
                yield f"{place(file)}, record {number}", value
        else:
            line_number = 1
            while piece := handle.read(PIECE):
                piece += "" if piece.endswith("\n") else handle.readline(PIECE)  # whole lines, if they are short
                yield place(file), {"text": _checked(piece, file, line_number)}
                line_number += piece.count("\n")


def _parse_line(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TrainingError(f"{where} is not JSON ({_reason(error)}); each line must be one JSON object") from None


def _parse_file(text: str, file: Path) -> list[Any]:
    """The records of a .json file: those of its array, or objects that follow each other."""
    decoder, values, at = json.JSONDecoder(), [], 0
    try:
        while (at := SPACE.match(text, at).end()) < len(text):  # type: ignore[union-attr]
            value, at = decoder.raw_decode(text, at)
            values.append(value)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1 + text.count("\n", 0, at))
        raise TrainingError(
            f"{place(file, line)} is not JSON ({_reason(error)}); a .json file must be an array of objects, or objects"
        ) from None
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


def _checked(text: str, file: Path, line: int = 1) -> str:
    """A text that begins at a line of a file, checked to be UTF-8."""
    if match := NO_TEXT.search(text):
        line += text.count("\n", 0, match.start())
        raise TrainingError(f"{place(file, line)} is not UTF-8 text; convert the file, unpack it, or leave it out")
    return text


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else shortened(str(error), LONGEST_VALUE)

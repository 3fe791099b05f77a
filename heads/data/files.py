# SPDX-License-Identifier: Apache-2.0
"""Files and records behind the paths that a user names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.text import LONGEST_VALUE, place, shortened

PIECE = 1 << 18  # characters of a plain text file that make one document
LINES_SUFFIXES = {".jsonl", ".ndjson"}
JSON_SUFFIX = ".json"
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
            inside = [file for file in sorted(path.rglob("*")) if file.is_file()]
            inside = [file for file in inside if not _is_hidden(file.relative_to(path))]
            if not inside:
                raise TrainingError(
                    f"data folder {place(path)!r} holds no files; {FORMS}"
                )
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            problem = "is not a regular file" if path.exists() else "does not exist"
            raise TrainingError(
                f"data file {place(path)!r} {problem}; {FORMS}, or folders of them"
            )
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def is_records(file: Path) -> bool:
    """Whether a file holds records. Other files are plain text."""
    return file.suffix in LINES_SUFFIXES or file.suffix == JSON_SUFFIX


def records(file: Path) -> Iterator[tuple[str, Any]]:
    """(file and line, JSON value) of each record; of plain text (file, {"text":
    piece}).

    Raises:
        TrainingError: on what is not JSON or not UTF-8; the message names file and
            line.
    """
    if file.suffix in LINES_SUFFIXES:
        yield from _lines(file)
    elif file.suffix == JSON_SUFFIX:
        yield from _array(file)
    else:
        yield from _pieces(file)


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            if line.strip():
                where = place(file, number)
                yield where, _parsed(line, where, "each line must be one JSON object")


def _array(file: Path) -> Iterator[tuple[str, Any]]:
    text = file.read_bytes()
    if not text.strip():
        return
    values = _parsed(text, place(file), "a .json file must be an array of objects")
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
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        reason = f"{error.msg}, {line}column {error.colno}"
    except UnicodeDecodeError:
        reason = "not UTF-8"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:
        reason = shortened(str(error), LONGEST_VALUE)
    raise TrainingError(f"{where} is not JSON ({reason}); {needed}")

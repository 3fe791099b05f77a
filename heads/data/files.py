# SPDX-License-Identifier: Apache-2.0
"""The files behind the paths a user names, and their lines, pieces and JSON values as streams."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.quote import LONGEST_VALUE, place, shortened

PIECE = 1 << 18  # characters of a plain text file that make one document
LONGEST_RECORD = 1 << 26  # characters; a longer one is a mistake, and would be held in memory
HEAD = 1 << 13  # bytes that tell what a file is
LINES_SUFFIXES = {".jsonl", ".ndjson"}
JSON_SUFFIX = ".json"
WHITE_SPACE = re.compile(r"[ \t\r\n]*")
FORMATS = {
    b"\x1f\x8b": "gzip-compressed; unpack it",
    b"\x28\xb5\x2f\xfd": "zstd-compressed; unpack it",
    b"\xfd7zXZ\x00": "xz-compressed; unpack it",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"PAR1": "a Parquet file; convert it to .jsonl",
    b"ARROW1": "an Arrow file; convert it to .jsonl",
}


def expand(paths: Sequence[str | Path]) -> list[Path]:
    """The files behind paths; a folder stands for every file in it that is not hidden, in order.

    Raises:
        TrainingError: if a path does not exist, a folder is empty, or a file is not text.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
            if not found:
                raise TrainingError(f"data folder {place(path)!r} holds no files; give .jsonl, .json or text files")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            problem = "is not a regular file" if path.exists() else "does not exist"
            raise TrainingError(
                f"data file {place(path)!r} {problem}; give .jsonl, .json or text files, or folders of them"
            )
    for file in files:
        _check_format(file)
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _check_format(file: Path) -> None:
    """Refuse by its first bytes what is no text."""
    with file.open("rb") as handle:
        head = handle.read(HEAD)
    for magic, what in FORMATS.items():
        if head.startswith(magic):
            raise TrainingError(f"{place(file)} is {what}, or leave it out")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise TrainingError(f"{place(file)} is not UTF-8 text (it is UTF-16); convert it or leave it out")
    if b"\0" in head:
        line = head[: head.index(b"\0")].count(b"\n") + 1
        raise TrainingError(f"{place(file, line)} is not UTF-8 text (a NUL byte); convert the file or leave it out")


def is_records(file: Path) -> bool:
    """Whether a file holds records; others are plain text."""
    return file.suffix in LINES_SUFFIXES or file.suffix == JSON_SUFFIX


def records(file: Path) -> Iterator[tuple[str, Any]]:
    """(file and line, JSON value) of each record; of plain text (file, {"text": piece}).

    Raises:
        TrainingError: on what is not JSON, not UTF-8 or too long; names file and line.
    """
    if file.suffix in LINES_SUFFIXES:
        for number, line in lines(file):
            if line.strip("\ufeff \t\r\n"):
                yield place(file, number), parse(line, place(file, number))
    elif file.suffix == JSON_SUFFIX:
        yield from ((place(file, number), value) for number, value in values(file))
    else:
        yield from ((place(file), {"text": piece}) for piece in pieces(file))


def lines(file: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines, from 1.

    Raises:
        TrainingError: on a line that is too long or not UTF-8.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="\n") as handle:
            number = 1
            while line := handle.readline(LONGEST_RECORD + 1):
                if len(line) > LONGEST_RECORD:
                    raise TrainingError(f"{place(file, number)} is over {LONGEST_RECORD:,} characters long; split it")
                yield number, line
                number += 1
    except UnicodeDecodeError:
        raise _not_utf8(file) from None


def pieces(file: Path) -> Iterator[str]:
    """A plain text as documents of whole lines, where lines are not too long.

    Raises:
        TrainingError: if the file is not UTF-8.
    """
    try:
        with file.open(encoding="utf-8-sig") as handle:
            while text := handle.read(PIECE):
                yield text if text.endswith("\n") else text + handle.readline(PIECE)
    except UnicodeDecodeError:
        raise _not_utf8(file) from None


def values(file: Path) -> Iterator[tuple[int, Any]]:
    """The records of a .json file, numbered by line: of its array, or its objects one after the other.

    Raises:
        TrainingError: on what is not JSON or not UTF-8.
    """
    try:
        with file.open(encoding="utf-8-sig") as handle:
            yield from _Values(handle, file)
    except UnicodeDecodeError:
        raise _not_utf8(file) from None


def parse(line: str, where: str) -> Any:
    """The JSON value of a line.

    Raises:
        TrainingError: if it is none.
    """
    try:
        return json.loads(line.lstrip("\ufeff"))  # files put together keep their byte-order marks
    except (ValueError, RecursionError) as error:
        raise TrainingError(f"{where} is not JSON ({_reason(error)}); each line must be one JSON object") from None


class _Values:
    """Top-level values of a text stream; what is held is one value and a buffer."""

    def __init__(self, handle: Any, file: Path) -> None:
        self.handle, self.file = handle, file
        self.buffer, self.at, self.line, self.ended = "", 0, 1, False

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        is_array = self._next() == "["
        self._advance(int(is_array))
        first = True
        while (char := self._next()) not in ("]" if is_array else "", ""):
            if is_array and not first:
                if char != ",":
                    raise self._error("a comma is missing between two records")
                self._advance(1)
                self._next()
            line = self.line
            yield line, self._value()
            first = False
        if is_array:
            if self._next() != "]":
                raise self._error("the array does not end")
            self._advance(1)
            if self._next():
                raise self._error("text after the array")

    def _next(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            self._advance(WHITE_SPACE.match(self.buffer, self.at).end() - self.at)  # type: ignore[union-attr]
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if not self._fill():
                return ""

    def _advance(self, count: int) -> None:
        self.line += self.buffer.count("\n", self.at, self.at + count)
        self.at += count

    def _fill(self) -> bool:
        """Read as much again as is held; false at the end."""
        self.buffer, self.at = self.buffer[self.at :], 0
        more = self.handle.read(max(PIECE, len(self.buffer)))
        self.buffer += more
        return bool(more)

    def _value(self) -> Any:
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self.buffer, self.at)
            except json.JSONDecodeError as error:
                # A value that the buffer cuts looks like a wrong one.
                if len(self.buffer) - self.at <= LONGEST_RECORD and self._fill():
                    continue
                raise self._error(error.msg, error.pos) from None
            except (ValueError, RecursionError) as error:
                raise self._error(_reason(error)) from None
            self._advance(end - self.at)
            return value

    def _error(self, reason: str, at: int | None = None) -> TrainingError:
        line = self.line + (self.buffer.count("\n", self.at, at) if at is not None else 0)
        return TrainingError(
            f"{place(self.file, line)} is not JSON ({reason}); a .json file must be one array of objects, or objects"
        )


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else shortened(str(error), LONGEST_VALUE)


def _not_utf8(file: Path) -> TrainingError:
    """The error that names the line, which a second pass finds."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, reason = 1, "invalid byte"
    with file.open("rb") as handle:
        try:
            while chunk := handle.read(1 << 20):
                decoder.decode(chunk)
                line += chunk.count(b"\n")
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            line, reason = line + error.object[: error.start].count(b"\n"), error.reason
    return TrainingError(f"{place(file, line)} is not UTF-8 text ({reason}); convert the file or leave it out")

# SPDX-License-Identifier: Apache-2.0
"""Documents from the files a user names: .jsonl with `text` or chat `messages`, or plain text; read as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_ppd.heads.training import TrainingError

PIECE = 1 << 18  # characters of a plain text file that make one document
JSON_SUFFIXES = {".jsonl", ".ndjson"}


def expand(paths: Sequence[str | Path]) -> list[Path]:
    """The files behind paths; a folder stands for every file in it, in order.

    Raises:
        TrainingError: if a path does not exist or a folder is empty.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
            if not found:
                raise TrainingError(f"data folder {str(path)!r} holds no files; give .jsonl or text files")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise TrainingError(
                f"data file {str(path)!r} does not exist; give .jsonl or text files, or folders of them"
            )
    return files


def documents(files: Sequence[Path], tokenizer: Any) -> Iterator[str]:
    """Yield the text of every document.

    Raises:
        TrainingError: on a line that is not JSON, lacks both columns, or mistypes one; names file and line.
    """
    for file in files:
        if file.suffix in JSON_SUFFIXES:
            yield from _lines(file, tokenizer)
        else:
            yield from _pieces(file)


def _lines(file: Path, tokenizer: Any) -> Iterator[str]:
    with file.open(encoding="utf-8") as handle:
        try:
            for number, line in enumerate(handle, start=1):
                if line.strip():
                    yield _text(line, f"{file}:{number}", tokenizer)
        except UnicodeDecodeError as error:
            raise TrainingError(f"{file} is not UTF-8 text ({error.reason}); convert it or leave it out") from None


def _text(line: str, where: str, tokenizer: Any) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TrainingError(f"{where} is not JSON ({error}); each line must be one JSON object") from None
    columns = sorted(record) if isinstance(record, dict) else []
    if "text" in columns:
        if not isinstance(record["text"], str):
            raise TrainingError(f"{where}: 'text' is of type {type(record['text']).__name__}; it must be a string")
        return record["text"]
    if "messages" in columns:
        return _chat(record["messages"], where, tokenizer)
    found = ", ".join(map(repr, columns)) or "no columns"
    raise TrainingError(f"{where} has {found}; each line needs 'text' (a string) or 'messages' (a chat)")


def _chat(messages: Any, where: str, tokenizer: Any) -> str:
    well_formed = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not well_formed or not messages:
        raise TrainingError(f"{where}: 'messages' must be a list of objects with 'role' and 'content' strings")
    if not getattr(tokenizer, "chat_template", None):
        raise TrainingError(f"{where} is a chat, and this model's tokenizer has no chat template; give 'text' instead")
    return tokenizer.apply_chat_template(messages, tokenize=False)


def _pieces(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8") as handle:
        try:
            while lines := handle.readlines(PIECE):
                yield "".join(lines)
        except UnicodeDecodeError as error:
            raise TrainingError(f"{file} is not UTF-8 text ({error.reason}); convert it or leave it out") from None

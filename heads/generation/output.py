# SPDX-License-Identifier: Apache-2.0
"""The file of chats, one per line, appended as they end and sorted by their numbers at the end of a run.

The numbers that a run begins depend on the options alone (write.py), and each chat depends on its seed. A run that
continues skips the chats in the file, so a run that was killed ends with the same file as one that was not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_ppd.heads.errors import TrainingError, refuse_other_options
from vllm_ppd.heads.files import replaced, write_text
from vllm_ppd.heads.locking import writing_file
from vllm_ppd.heads.quote import place

SYNC_EVERY = 64  # chats between two syncs to disk


class Chat(BaseModel):
    """A prompt and the target's response, as token ids."""

    model_config = ConfigDict(extra="forbid")

    prompt_token_ids: list[int] = Field(min_length=1)
    token_ids: list[int]  # the response, with its end-of-text token if the target wrote one
    finish_reason: Literal["stop", "length"]  # "length": the response was cut off
    index: int = Field(ge=0)  # number of the prompt, or of the attempt at a user turn


class ChatFile:
    """A file to which chats are appended, with one writer at a time; a line that a kill has cut off is dropped.

    with ChatFile(path, essence) as file: read() to its end, then write().

    Args:
        path: the .jsonl file.
        essence: options that all its chats share; kept in a hidden file beside it.
    """

    def __init__(self, path: Path, essence: dict[str, Any]) -> None:
        self.path, self.tokens = path, 0
        self.numbers: dict[int, None] = {}  # numbers of the chats in the file, in its order
        self._options, self._essence = path.with_name(f".{path.name}.options.json"), essence
        self._is_read = False

    @property
    def count(self) -> int:
        """Chats in the file."""
        return len(self.numbers)

    def __enter__(self) -> ChatFile:
        """Open the file for reading and further chats.

        Raises:
            InUse: if another process writes it.
            TrainingError: if it was written with other options, or not by `ppd data`.
        """
        with ExitStack() as stack:
            stack.enter_context(writing_file(self.path))
            if self.path.exists() and self.path.stat().st_size:
                self._check_options()
            write_text(self._options, json.dumps(self._essence, indent=2) + "\n")
            self._file = stack.enter_context(self.path.open("ab"))
            self._stack = stack.pop_all()
        return self

    def read(self) -> Iterator[Chat]:
        """The chats of earlier runs, in the order of the file.

        Raises:
            TrainingError: on a line that is not a chat.
        """
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    chat = Chat.model_validate_json(line)
                except ValidationError:
                    raise TrainingError(
                        f"{place(self.path, number)} is damaged; delete this line and run the command again"
                    ) from None
                self._note(chat)
                end += len(line)
                yield chat
        self._file.truncate(end)
        self._is_read = True

    def write(self, chat: Chat) -> None:
        """Append a chat."""
        self._file.write(chat.model_dump_json().encode() + b"\n")
        self._file.flush()
        self._note(chat)
        if self.count % SYNC_EVERY == 0:
            os.fsync(self._file.fileno())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            os.fsync(self._file.fileno())
            if self._is_read and (kind is None or issubclass(kind, KeyboardInterrupt)):
                self._sort()

    def _sort(self) -> None:
        if list(self.numbers) != sorted(self.numbers):
            lines = dict(zip(self.numbers, self.path.read_bytes().splitlines(keepends=True), strict=True))
            with replaced(self.path.resolve()) as new:
                new.write_bytes(b"".join(lines[number] for number in sorted(lines)))

    def _note(self, chat: Chat) -> None:
        self.numbers[chat.index] = None
        self.tokens += len(chat.prompt_token_ids) + len(chat.token_ids)

    def _check_options(self) -> None:
        try:
            stored = json.loads(self._options.read_bytes())
            theirs = {name: stored.get(name) for name in self._essence}
        except (OSError, ValueError, AttributeError):
            raise TrainingError(f"--out {place(self.path)} was not written by `ppd data`; give another file") from None
        refuse_other_options(f"--out {place(self.path)} was written", theirs, self._essence, "another file")

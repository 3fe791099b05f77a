# SPDX-License-Identifier: Apache-2.0
"""The file of chats: a line each, in the order of their numbers, so that a run continues after the last one."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_ppd.heads.io import write_text
from vllm_ppd.heads.quote import place, quoted
from vllm_ppd.heads.training import TrainingError

SYNC_EVERY = 64  # chats between two waits for the disk


class Chat(BaseModel):
    """A prompt and the target's response, as token ids."""

    model_config = ConfigDict(extra="forbid")

    prompt_token_ids: list[int] = Field(min_length=1)
    token_ids: list[int]  # the response, with its end-of-text token if the target wrote one
    finish_reason: Literal["stop", "length"]  # "length": the response was cut off
    index: int = Field(ge=0)  # of the prompt, or of the attempt at a user turn


class ChatFile:
    """A file that chats are appended to; a line that a kill has cut is dropped.

    Args:
        path: the .jsonl file.
        essence: options that all its chats share; kept in a hidden file beside it.

    Raises:
        TrainingError: if the file was written with other options, or is not of `ppd data`.
    """

    def __init__(self, path: Path, essence: dict[str, Any]) -> None:
        self.path, self.count, self.tokens, self.next_index = path, 0, 0, 0
        self._options, self._essence = path.with_name(f".{path.name}.options.json"), essence
        self._whole = 0  # bytes of lines that were read
        if path.exists() and path.stat().st_size:
            self._check_options()

    def read(self) -> Iterator[Chat]:
        """The chats of earlier runs, which are counted.

        Raises:
            TrainingError: on a line that is not a chat.
        """
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    chat = Chat.model_validate_json(line)
                except ValidationError:
                    raise TrainingError(
                        f"{place(self.path, number)} is damaged; delete this line and those after it to continue there"
                    ) from None
                self._whole += len(line)
                self._count(chat)
                yield chat

    def __enter__(self) -> ChatFile:
        """Open the file for further chats.

        Raises:
            TrainingError: if another run writes to it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise TrainingError(f"--out {place(self.path)} is written by another run; give another file") from None
        write_text(self._options, json.dumps(self._essence, indent=2) + "\n")
        self._file.truncate(self._whole)
        return self

    def write(self, chat: Chat) -> None:
        """Append a chat."""
        self._file.write(chat.model_dump_json().encode() + b"\n")
        self._count(chat)
        if self.count % SYNC_EVERY == 0:
            self._sync()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sync()
        self._file.close()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def _count(self, chat: Chat) -> None:
        self.count, self.next_index = self.count + 1, chat.index + 1
        self.tokens += len(chat.prompt_token_ids) + len(chat.token_ids)

    def _check_options(self) -> None:
        try:
            found = json.loads(self._options.read_bytes())
            theirs = {name: found.get(name) for name in self._essence}
        except (OSError, ValueError, AttributeError):
            raise TrainingError(f"--out {place(self.path)} is not of this command; give another file") from None
        for name, ours in self._essence.items():
            if theirs[name] != ours:
                raise TrainingError(
                    f"--out {place(self.path)} was written with {name}={quoted(theirs[name])}, and this run has "
                    f"{quoted(ours)}: give the same options to continue it, or another file"
                )

# SPDX-License-Identifier: Apache-2.0
"""What an engine has written that is not in the file of chats yet: a stopped run does not compute it again.

Chats are written in the order of their numbers, and one that takes long holds back as many as the engine has meanwhile
ended. A request says the same in every run (its seed is its own), so that what it said need only be kept.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from vllm_ppd.heads.generation.engine import Continuation, Engine, Request
from vllm_ppd.heads.io import write_text


class Journal:
    """An engine that answers what it is asked again from a file, which is removed when a run ends by itself.

    Args:
        engine: computes the rest.
        path: of the file; a line that a kill has cut is dropped, and so is a file of other options.
        first: the first number whose chat is not decided.
        essence: options that the file's continuations share.
    """

    def __init__(self, engine: Engine, path: Path, first: int, essence: dict[str, Any]) -> None:
        self.engine, self.path = engine, path
        header = json.dumps({"options": hashlib.sha256(json.dumps(essence).encode()).hexdigest()})
        self._known = {one.key: one for one in _read(path, header) if number_of(one) >= first}
        self._found: list[Continuation] = []  # asked for, and known
        write_text(path, "\n".join([header, *map(_line, self._known.values()), ""]))
        self._file = path.open("a")

    def submit(self, request: Request) -> None:
        """Queue a request."""
        found = self._known.pop(request.key, None)
        if found is None:
            self.engine.submit(request)
        else:
            self._found.append(found)

    def step(self) -> list[Continuation]:
        """What is known of the requests, else one step of the engine; returns those that have ended."""
        if self._found:
            found, self._found = self._found, []
            return found
        ended = self.engine.step()
        self._file.writelines(f"{_line(one)}\n" for one in ended)
        self._file.flush()
        return ended

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None:
            self.path.unlink()


def number_of(continuation: Continuation) -> int:
    """Of the chat that it belongs to."""
    return int(continuation.key.rpartition(" ")[2])


def _line(continuation: Continuation) -> str:
    return json.dumps(continuation._asdict())


def _read(path: Path, header: str) -> list[Continuation]:
    """Of the lines that are whole; none of a file with another header."""
    if not path.exists():
        return []
    first, *lines = path.read_text(errors="replace").split("\n")[:-1] or [""]
    if first != header:
        return []
    found: list[Continuation] = []
    for line in lines:
        try:
            one = Continuation(**json.loads(line))
            number_of(one)
        except (ValueError, TypeError, AttributeError):
            break
        found.append(one)
    return found

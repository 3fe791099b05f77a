# SPDX-License-Identifier: Apache-2.0
"""Files on this disk: JSON objects, files that are written whole or not at all, and locks
for a single writer, which end with the process that holds them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from pydantic_core import from_json
from safetensors import SafetensorError

from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.text import LONGEST_VALUE, StrPath, quoted, shortened

if TYPE_CHECKING:
    import torch


def read_json_object(
    path: Path, instead: str = "write the heads again"
) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        MissingFile: if there is no such file.
        HeadsError: if it holds no JSON object; `instead` says what to do then.
    """
    if not path.is_file():
        folder = quoted(str(path.parent))
        raise MissingFile(
            f"heads folder {folder} has no {path.name}; is this the right folder?"
        )
    try:
        data = from_json(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = shortened(str(error), LONGEST_VALUE)
        raise HeadsError(
            f"{named(path)} is not valid JSON ({reason}); {instead}"
        ) from None
    if not isinstance(data, dict):
        raise HeadsError(
            f"{named(path)} holds {quoted(data)}, not an object; {instead}"
        )
    return data


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with replaced(path) as new:
        new.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file whole or not at all.

    Raises:
        OSError: if it cannot be written; a file that was there stays as it was.
    """
    from safetensors.torch import save_file

    try:
        with replaced(path) as new:
            save_file(tensors, new, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from None


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Open a new file that replaces `path`, synced to disk, when the block ends without
    an error.
    """
    # Processes of a training may write the same file at once
    new = path.with_name(f"{path.name}.{os.getpid()}.part")
    new.unlink(missing_ok=True)
    new.touch()
    # The umask gives this mode; safetensors lets only the owner read
    mode = new.stat().st_mode & 0o777
    try:
        yield new
        new.chmod(mode)
        with new.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest_of_value(value: Any) -> str:
    """The SHA-256 of a JSON value in hexadecimal."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def named(path: Path) -> str:
    """The name of a file for messages."""
    return f"{path.name} in {quoted(str(path.parent))}"


class InUse(HeadsError):
    """A folder or file that another process is writing."""


def writing_folder(
    folder: StrPath, name: str = "--out"
) -> contextlib.AbstractContextManager[None]:
    """Become the only writer of a folder, which is made if it is missing.

    Args:
        folder: what is written.
        name: of the folder in messages, before its path.

    Raises:
        InUse: if another process is writing it.
        HeadsError: if it cannot be made or written.
    """
    return _locked(Path(folder) / ".lock", f"{name} {folder}")


def writing_file(
    path: StrPath,
) -> contextlib.AbstractContextManager[None]:
    """Become the only writer of a file, that of --out; its folder is made if it is missing.

    Raises:
        InUse, HeadsError: as writing_folder.
    """
    real = Path(path).resolve()
    return _locked(real.with_name(f".{real.name}.lock"), f"--out {path}")


@contextlib.contextmanager
def _locked(file: Path, what: str) -> Iterator[None]:
    lock = FileLock(file, timeout=0)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise InUse(
            f"{what} is being written by another process; wait for it, or use "
            "another path"
        ) from None
    except OSError as error:
        raise HeadsError(
            f"{what} cannot be written ({error.strerror}); make it writable, or use "
            "another path"
        ) from None
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()

# SPDX-License-Identifier: Apache-2.0
"""Files of a heads folder, which are read only if they are regular and of sane size, and written atomically.

Digests detect unfinished work that is damaged or was made from something else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from safetensors import SafetensorError

from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.quote import LONGEST_VALUE, quoted, shortened

if TYPE_CHECKING:
    import torch


def check_is_folder(folder: str | os.PathLike[str]) -> None:
    """Refuse a name that is no local folder.

    Raises:
        HeadsError: if it is empty, missing, too long, a file, or may not be looked at.
    """
    name, instead = os.fspath(folder), "give a folder with config.json, or omit the heads"
    if not name:
        raise HeadsError(f"the name of the heads folder is empty; {instead}")
    try:
        is_folder = stat.S_ISDIR(os.stat(name).st_mode)
    except (OSError, ValueError) as error:
        problem = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be opened ({_reason(error)})"
        raise HeadsError(f"heads folder {quoted(name)} {problem}; {instead}") from None
    if not is_folder:
        raise HeadsError(f"{quoted(name)} is a file, not a heads folder; {instead}")


def check_is_regular(path: Path) -> int:
    """Check that a file is regular, without reading it; returns its size in bytes.

    Raises:
        MissingFile: if there is none.
        HeadsError: if it is a folder, a FIFO, a device or the like, or may not be looked at.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        folder = quoted(str(path.parent))
        raise MissingFile(f"heads folder {folder} has no {path.name}; is this the right folder?") from None
    except (OSError, ValueError) as error:
        raise HeadsError(f"{named(path)} cannot be opened ({_reason(error)})") from None
    if not stat.S_ISREG(status.st_mode):
        raise HeadsError(f"{named(path)} is not a regular file; write the heads again")
    return status.st_size


def read_json_object(path: Path, most: int, instead: str = "write the heads again") -> dict[str, Any]:
    """The object that a JSON file holds; it is not read if it has more than `most` bytes.

    Raises:
        MissingFile: if there is none.
        HeadsError: if it is not a regular file, too large, or not an object in UTF-8; `instead` says what to do then.
    """
    size = check_is_regular(path)
    if size > most:
        raise HeadsError(f"{named(path)} has {size:,} bytes, more than the limit of {most:,}; {instead}")
    try:
        # Do not wait for a writer if a FIFO has replaced the file meanwhile.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            data = from_json(file.read(most))
    except OSError as error:
        raise HeadsError(f"{named(path)} cannot be read ({_reason(error)}); {instead}") from None
    except ValueError as error:  # also if nested too deeply
        raise HeadsError(f"{named(path)} is not valid JSON ({_reason(error)}); {instead}") from None
    if not isinstance(data, dict):
        raise HeadsError(f"{named(path)} holds {quoted(data)}, not an object; {instead}")
    return data


def first_problem(error: ValidationError) -> str:
    """The first of pydantic's problems in one line: which field, and what is wrong with it."""
    problem = error.errors(include_url=False, include_context=False)[0]
    message = shortened(problem["msg"].removeprefix("Value error, "), 120)
    field = shortened(".".join(map(str, problem["loc"])), LONGEST_VALUE)
    return f"{field}: {message}" if field else message


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all.

    Raises:
        OSError: if it cannot be written; a file that was there stays as it was.
    """
    with replaced(path) as new:
        new.write_text(text, encoding="utf-8")


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file whole or not at all.

    Raises:
        OSError: as write_text.
    """
    from safetensors.torch import save_file

    try:
        with replaced(path) as new:
            save_file(tensors, new, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from None


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Open a new file that replaces `path`, synced to disk, when the block ends without an error."""
    new = path.with_name(path.name + ".part")
    new.unlink(missing_ok=True)  # left by a killed run, or a link, which is not followed
    os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    try:
        mode = stat.S_IMODE(new.stat().st_mode)  # the umask's permissions; safetensors grants the owner only
        yield new
        new.chmod(mode)
        _sync(new)
        os.replace(new, path)
        with contextlib.suppress(OSError):  # not every file system syncs folders
            _sync(path.parent)
    finally:
        new.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FileDigest(BaseModel):
    """Size and digest of a file when it was written."""

    size: int  # bytes
    sha256: str


def digest_of(path: Path) -> FileDigest:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return FileDigest(size=path.stat().st_size, sha256=digest.hexdigest())


def digest_of_value(value: Any) -> str:
    """The digest of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def first_damaged(folder: Path, digests: Mapping[str, FileDigest]) -> Path | None:
    """The first file of a folder that is missing or has changed; None if none has."""
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != digest.size or digest_of(path) != digest:
            return path
    return None


def named(path: Path) -> str:
    """The name of a file for messages."""
    return f"{path.name} in {quoted(str(path.parent))}"


def _reason(error: OSError | ValueError) -> str:
    """The message of the operating system or a parser, without the path, which may be long."""
    return getattr(error, "strerror", None) or shortened(str(error), LONGEST_VALUE)

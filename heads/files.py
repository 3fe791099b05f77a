# SPDX-License-Identifier: Apache-2.0
"""Files of a heads folder: read if they are regular and of a sane size, and written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from safetensors import SafetensorError

from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.quote import LONGEST_VALUE, quoted, shortened

if TYPE_CHECKING:
    import torch

DEEPEST = 64  # levels of lists and objects in a JSON file


def check_is_folder(folder: str | os.PathLike[str]) -> None:
    """Refuse a name that is no folder of this disk.

    Raises:
        HeadsError: if it is empty, missing, too long, a file, or may not be looked at.
    """
    name = os.fspath(folder)
    if not name:
        raise HeadsError("the name of the heads folder is empty; give a folder with config.json, or no heads")
    try:
        mode = os.stat(name).st_mode
    except FileNotFoundError:
        raise HeadsError(
            f"heads folder {quoted(name)} does not exist; give a folder with config.json, or no heads"
        ) from None
    except (OSError, ValueError) as error:
        raise HeadsError(f"heads folder {quoted(name)} cannot be opened ({reason(error)}); give a folder") from None
    if not stat.S_ISDIR(mode):
        raise HeadsError(f"{quoted(name)} is a file, and heads are a folder; give the folder that holds config.json")


def regular_size(path: Path) -> int:
    """Bytes of a regular file, which nothing is read of.

    Raises:
        MissingFile: if there is none.
        HeadsError: if it is a folder, a FIFO, a device or the like, or may not be looked at.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise MissingFile(f"{of_folder(path)} has no {path.name}; is this the right folder?") from None
    except (OSError, ValueError) as error:
        raise HeadsError(f"{named(path)} cannot be opened ({reason(error)})") from None
    if not stat.S_ISREG(status.st_mode):
        raise HeadsError(f"{named(path)} is {_kind(status.st_mode)}, not a regular file; write the heads again")
    return status.st_size


def read_json(path: Path, most: int, instead: str = "write the heads again") -> Any:
    """What a JSON file holds; it is not read if it has more than `most` bytes.

    Raises:
        MissingFile: if there is none.
        HeadsError: if it is not a regular file, too large, or not JSON in UTF-8; `instead` says what to do then.
    """
    size = regular_size(path)
    if size > most:
        raise HeadsError(f"{named(path)} has {size:,} bytes, more than the {most:,} that are read; {instead}")
    try:
        # Not to wait for a writer, should a FIFO have taken its place meanwhile.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            text = file.read(most).decode()
    except UnicodeDecodeError:
        raise HeadsError(f"{named(path)} is not text in UTF-8; {instead}") from None
    except OSError as error:
        raise HeadsError(f"{named(path)} cannot be read ({reason(error)}); {instead}") from None
    if text.startswith("\ufeff"):
        raise HeadsError(f"{named(path)} begins with a byte order mark; save it as UTF-8 without one")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HeadsError(
            f"{named(path)} is not valid JSON ({shortened(str(error), LONGEST_VALUE)}); {instead}"
        ) from None
    if _deeper(data, DEEPEST):
        raise HeadsError(f"{named(path)} is nested more than {DEEPEST} levels deep; {instead}")
    return data


def read_json_object(path: Path, most: int, instead: str = "write the heads again") -> dict[str, Any]:
    """As read_json, of a file that must hold an object.

    Raises:
        MissingFile, HeadsError: as read_json, and if it holds anything else.
    """
    data = read_json(path, most, instead)
    if not isinstance(data, dict):
        raise HeadsError(f"{named(path)} holds {_json_kind(data)}, not an object; {instead}")
    return data


def first_problem(error: ValidationError) -> str:
    """The first of pydantic's problems in one line: which field, and what is wrong with it."""
    problem = error.errors(include_url=False, include_context=False)[0]
    message = problem["msg"].removeprefix("Value error, ")
    place = shortened(".".join(str(part) for part in problem["loc"]), LONGEST_VALUE)
    return f"{place}: {shortened(message, 120)}" if place else shortened(message, 120)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all.

    Raises:
        OSError: if it cannot be written; a file that was there stays as it was.
    """
    with replaced(path) as part:
        part.write_text(text, encoding="utf-8")


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file whole or not at all.

    Raises:
        OSError: if it cannot be written; a file that was there stays as it was.
    """
    from safetensors.torch import save_file

    try:
        with replaced(path) as part:
            save_file(tensors, part, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from None


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A new file to write; where that ends without an error, it takes the place of `path` and is on the disk."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)  # of a run that was killed, or a link, which is not followed
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    try:
        mode = stat.S_IMODE(part.stat().st_mode)  # as the umask allows; safetensors writes for the owner alone
        yield part
        part.chmod(mode)
        _sync(part)
        os.replace(part, path)
        with contextlib.suppress(OSError):  # not every file system syncs folders
            _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def of_folder(path: Path) -> str:
    """The folder of a file, as a message names it."""
    return f"heads folder {quoted(str(path.parent))}"


def named(path: Path) -> str:
    """A file, as a message names it."""
    return f"{path.name} in {quoted(str(path.parent))}"


def reason(error: OSError | ValueError) -> str:
    """What the operating system says, without the path, which may be long."""
    return getattr(error, "strerror", None) or shortened(str(error), LONGEST_VALUE)


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device")


def _json_kind(data: Any) -> str:
    names = {type(None): "null", bool: "a truth value", int: "a number", float: "a number", str: "a string"}
    return names.get(type(data), "a list")


def _deeper(data: Any, levels: int) -> bool:
    """Whether lists and objects are nested deeper than that."""
    level = [data] if isinstance(data, dict | list) else []
    for _ in range(levels + 1):
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return False
    return True

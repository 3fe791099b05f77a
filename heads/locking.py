# SPDX-License-Identifier: Apache-2.0
"""Locks for a single writer of a folder or a file; a lock ends with the process that holds it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from vllm_ppd.heads.errors import HeadsError


class InUse(HeadsError):
    """A folder or file that another process is writing."""


def writing_folder(
    folder: str | os.PathLike[str], named: str = "--out"
) -> contextlib.AbstractContextManager[None]:
    """Become the only writer of a folder, which is made if it is missing.

    Args:
        folder: what is written.
        named: its name in messages, before its path.

    Raises:
        InUse: if another process is writing it.
        HeadsError: if it cannot be made or written.
    """
    return _locked(Path(folder) / ".lock", f"{named} {folder}")


def writing_file(
    path: str | os.PathLike[str], named: str = "--out"
) -> contextlib.AbstractContextManager[None]:
    """Become the only writer of a file; its folder is made if it is missing.

    Raises:
        InUse, HeadsError: as writing_folder.
    """
    real = Path(path).resolve()
    return _locked(real.with_name(f".{real.name}.lock"), f"{named} {path}")


@contextlib.contextmanager
def _locked(file: Path, what: str) -> Iterator[None]:
    lock = FileLock(file, timeout=0)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise InUse(
            f"{what} is being written by another process; wait for it, or give "
            "another path"
        ) from None
    except OSError as error:
        raise HeadsError(
            f"{what} cannot be written ({error.strerror}); make it writable, or give "
            "another path"
        ) from None
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()

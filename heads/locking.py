# SPDX-License-Identifier: Apache-2.0
"""Locks for a single writer of a folder or a file; a lock ends with the process that holds it.

Readers take no lock. The kernel releases it with its process, so a kill leaves at most a file that locks nothing.
"""

import contextlib
import errno
import fcntl
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.quote import LONGEST_VALUE, place, shortened

LONGEST_HOLDER = 150  # characters of a message's description of the writing process

FULL = (errno.ENOSPC, errno.EDQUOT)

_locks: set[int] = set()  # descriptors of locks that this process holds


class InUse(HeadsError):
    """A folder or file that another process is writing."""


@contextlib.contextmanager
def writing_folder(folder: str | os.PathLike[str], named: str = "--out") -> Iterator[None]:
    """Become the only writer of a folder, which is made if it is missing, and removed again if it stays empty.

    Args:
        folder: what is written.
        named: its name in messages, before its path.

    Raises:
        InUse: if another process is writing it.
        HeadsError: if it cannot be made or written.
        OSError: if the disk is full.
    """
    folder = Path(folder)
    fresh = not folder.exists()
    try:
        with _locked(folder / ".lock", f"{named} {place(folder)}", "folder"):
            yield
    finally:
        if fresh:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def writing_file(path: str | os.PathLike[str], named: str = "--out") -> Iterator[None]:
    """Become the only writer of a file; its folder is made if it is missing.

    Raises:
        InUse, HeadsError, OSError: as writing_folder.
    """
    path = Path(path)
    real = path.resolve()
    with _locked(real.with_name(f".{real.name}.lock"), f"{named} {place(path)}", "file"):
        yield


@contextlib.contextmanager
def _locked(lock: Path, what: str, kind: str) -> Iterator[None]:
    descriptor = _take(lock, what, kind)
    _locks.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _locks:  # not in a forked child
            _locks.discard(descriptor)
            with contextlib.suppress(OSError):
                lock.unlink()
            os.close(descriptor)


def _take(lock: Path, what: str, kind: str) -> int:
    """Take the lock and note the holder in the file; returns the descriptor that holds it."""
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # the previous holder has removed the empty folder
            continue
        except OSError as error:
            if error.errno in FULL:
                raise
            reason = error.strerror or type(error).__name__
            raise HeadsError(f"{what} cannot be written ({reason}); make it writable, or give another {kind}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise InUse(f"{what} is being written by {holder}; wait for it, or give another {kind}") from None
        except OSError:
            pass  # the file system has no locks
        # The previous holder may have removed the file after it was opened.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _note().encode(errors="replace"), 0)
                return descriptor
        os.close(descriptor)


def _note() -> str:
    """A note about this process for others that want the lock: its host, id and command."""
    words = list(sys.orig_argv)
    if len(words) > 1 and not words[1].startswith("-"):  # a script, not `python -m`
        del words[0]
    words[0] = Path(words[0]).name
    command = shortened(shlex.join(words), LONGEST_VALUE)
    return f"{platform.node()}\nprocess {os.getpid()} ({command}, since {time.strftime('%Y-%m-%d %H:%M')})"


def _holder(descriptor: int) -> str:
    """The holder of a lock, from its note."""
    host, _, process = os.pread(descriptor, 1024, 0).decode(errors="replace").partition("\n")
    if not process:
        return "another process"
    return shortened(process if host == platform.node() else f"{process} on {host}", LONGEST_HOLDER)


def _release_in_child() -> None:
    """A forked child, such as an engine that outlives its parent, must not hold the parent's locks."""
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_release_in_child)

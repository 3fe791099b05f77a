# SPDX-License-Identifier: Apache-2.0
"""Sizes and hashes of the files of an unfinished run, by which damage is noticed before it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel


class FileDigest(BaseModel):
    """What a file was when it was written."""

    size: int  # bytes
    sha256: str


def digest_of(path: Path) -> FileDigest:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return FileDigest(size=path.stat().st_size, sha256=digest.hexdigest())


def first_damaged(folder: Path, digests: Mapping[str, FileDigest]) -> Path | None:
    """The first of a folder's files that is missing or is not what it was; None if all are."""
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != digest.size or digest_of(path) != digest:
            return path
    return None

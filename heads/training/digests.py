# SPDX-License-Identifier: Apache-2.0
"""Hashes by which unfinished work tells what is damaged, or was made of something else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def digest_of_value(value: Any) -> str:
    """Of what JSON holds."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def first_damaged(folder: Path, digests: Mapping[str, FileDigest]) -> Path | None:
    """The first of a folder's files that is missing or is not what it was; None if all are."""
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != digest.size or digest_of(path) != digest:
            return path
    return None

# SPDX-License-Identifier: Apache-2.0
"""`tokens.json`: which data the token files beside it are of, and what they hash to, so that damage is found."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.io import write_text
from vllm_ppd.heads.quote import place

NAME = "tokens.json"


class TokenFile(BaseModel):
    """One of the token files."""

    size: int  # bytes
    sha256: str


class Manifest(BaseModel):
    """Written when all token files are whole."""

    model_config = ConfigDict(extra="forbid")

    key: str  # of the data, the split and the tokenizer
    files: dict[str, TokenFile]
    documents: int
    skipped: dict[str, int]  # records by reason

    @property
    def digest(self) -> str:
        """A hash of all tokens: what a run may go on with."""
        parts = "".join(f"{name} {file.sha256}\n" for name, file in sorted(self.files.items()))
        return hashlib.sha256(parts.encode()).hexdigest()


def intact_manifest(folder: Path, key: str, names: Sequence[str]) -> Manifest | None:
    """The manifest if it and the files it names are whole and of this data; None if they are to be written (again).

    Damage is told on stderr: the files are made of the data, so that nothing is lost.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except ValidationError:
        damaged = [path]
    else:
        if manifest.key != key:
            return None
        damaged = [folder / name for name in names if not _is_whole(folder / name, manifest)]
        if not damaged:
            return manifest
    print(f"vllm-ppd: {place(damaged[0])} is damaged or missing; tokenising the data again", file=sys.stderr)
    return None


def _is_whole(path: Path, manifest: Manifest) -> bool:
    file = manifest.files.get(path.name)
    return file is not None and path.is_file() and path.stat().st_size == file.size and _described(path) == file


def write_manifest(folder: Path, key: str, names: Sequence[str], documents: int, skipped: dict[str, int]) -> Manifest:
    """Describe files that were just written."""
    files = {name: _described(folder / name) for name in names}
    manifest = Manifest(key=key, files=files, documents=documents, skipped=skipped)
    write_text(folder / NAME, manifest.model_dump_json())
    return manifest


def check_same_tokens(path: Path, before: str | None, now: str) -> None:
    """Refuse to go on with tokens that are not those a checkpoint was trained on (None: it does not say).

    Raises:
        TrainingError: if they differ.
    """
    if before is not None and before != now:
        raise TrainingError(
            f"{place(path)} was trained on other tokens: the data or the tokenizer has changed; give the same again, "
            f"or delete the folder {path.parent.name} there to start again"
        )


def _described(path: Path) -> TokenFile:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return TokenFile(size=path.stat().st_size, sha256=digest.hexdigest())

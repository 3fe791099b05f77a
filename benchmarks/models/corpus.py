# SPDX-License-Identifier: Apache-2.0
"""The demo corpus: the sources of Python's standard library, which every machine has.

`python -m vllm_ppd.benchmarks.models corpus --out build/corpus` writes train.jsonl and
validation.jsonl for `ppd train`.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, Field

# Tables, generated data and deliberately broken files teach a language model nothing.
SKIPPED_FOLDERS = {
    "site-packages",
    "encodings",
    "pydoc_data",
    "cjkencodings",
    "lib2to3",
    "__pycache__",
}
SKIPPED_PREFIXES = ("bad", "badsyntax")
MAX_BYTES = 300_000
VALIDATION_SHARE = 0.02


class CorpusOptions(BaseModel):
    """Where to write the corpus."""

    out: str = Field(description="folder of train.jsonl and validation.jsonl")


def run(options: CorpusOptions) -> int:
    """Write both files."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, texts in zip(("train", "validation"), split(), strict=True):
        path = out / f"{name}.jsonl"
        path.write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
        print(f"{path}: {len(texts)} documents")
    return 0


def sources() -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) of every usable source file, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts):
            continue
        if path.name.startswith(SKIPPED_PREFIXES):
            continue
        if 200 <= path.stat().st_size <= MAX_BYTES:
            with suppress(UnicodeDecodeError):
                yield relative.as_posix(), path.read_text(encoding="utf-8")


def split() -> tuple[list[str], list[str]]:
    """Return (training texts, validation texts); a hash of its path holds a file out."""
    texts: tuple[list[str], list[str]] = [], []
    for name, text in sources():
        digest = hashlib.sha256(name.encode()).digest()
        place = int.from_bytes(digest[:4], "big") / 2**32
        texts[place < VALIDATION_SHARE].append(text)
    return texts

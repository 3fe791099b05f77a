# SPDX-License-Identifier: Apache-2.0
"""The demo corpus: the Python standard library's own sources, which every machine has.

`python -m vllm_ppd.benchmarks.models.corpus --out build/corpus` writes train.jsonl and validation.jsonl for
`ppd train`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from vllm_ppd.benchmarks import only_writer
from vllm_ppd.heads.files import write_text

# Tables, generated data and deliberately broken files teach a language model nothing.
SKIPPED_PARTS = {"site-packages", "encodings", "pydoc_data", "cjkencodings", "lib2to3", "__pycache__"}
SKIPPED_PREFIXES = ("bad", "badsyntax")
MAX_BYTES = 300_000
VALIDATION_SHARE = 0.02


def sources(root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) of every usable source file, in a fixed order."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_PARTS & set(relative.parts) or relative.name.startswith(SKIPPED_PREFIXES):
            continue
        if not 200 <= path.stat().st_size <= MAX_BYTES:
            continue
        try:
            yield relative.as_posix(), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def is_validation(name: str) -> bool:
    """Whole files are held out, chosen by a hash of their path: no line is in both parts."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < VALIDATION_SHARE


def split(root: Path | None = None) -> tuple[list[str], list[str]]:
    """Return (training texts, validation texts)."""
    train: list[str] = []
    validation: list[str] = []
    for name, text in sources(root):
        (validation if is_validation(name) else train).append(text)
    return train, validation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with only_writer(args.out):
        for name, texts in zip(("train", "validation"), split(), strict=True):
            write_text(args.out / f"{name}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
            print(f"{args.out / name}.jsonl: {len(texts)} documents")


if __name__ == "__main__":
    main()

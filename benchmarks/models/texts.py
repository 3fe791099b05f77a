# SPDX-License-Identifier: Apache-2.0
"""Texts on which models and heads are trained.

`python -m vllm_ppd.benchmarks.models corpus --out build/corpus` writes the demo corpus,
train.jsonl and validation.jsonl for `ppd train`: the sources of Python's standard
library, which every machine has.

    python -m vllm_ppd.benchmarks.models unpack --answers answers.jsonl.xz --prompts
    prompts.jsonl \\
        --model M --out FILE

joins a target's answers with their prompts, whose licenses vary. Each line of
answers.jsonl.xz has the tokens of an answer and a digest of the prompt's tokens.
"""

import hashlib
import json
import lzma
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from vllm_ppd.heads.files import digest_of_value

# Tables, generated data and deliberately broken files teach a language model nothing.
SKIPPED_FOLDERS = {
    "site-packages",
    "encodings",
    "pydoc_data",
    "cjkencodings",
    "lib2to3",
    "__pycache__",
}
MAX_BYTES = 300_000
VALIDATION_SHARE = 0.02
DIGITS = 16  # digits of a prompt's digest


class CorpusOptions(BaseModel):
    """Where to write the corpus."""

    out: str = Field(description="folder of train.jsonl and validation.jsonl")


def write_corpus(options: CorpusOptions) -> int:
    """Write train.jsonl and validation.jsonl."""
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
        if path.name.startswith("bad"):
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


class UnpackOptions(BaseModel):
    """Options for joining packed answers with their prompts."""

    answers: str = Field(description=".jsonl.xz of answers")
    prompts: str = Field(
        description=".jsonl of chats, in any order; other answers are left out"
    )
    model: str = Field(
        description="the target that answered, whose chat template renders prompts"
    )
    out: str = Field(description=".jsonl to write, for `ppd train --data`")


def unpack(options: UnpackOptions) -> int:
    """Write the chats as `ppd data` wrote them, without those whose prompts are missing."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    prompts = {}
    with open(options.prompts, encoding="utf-8") as file:
        for line in file:
            rendered = tokenizer.apply_chat_template(
                json.loads(line)["messages"],
                add_generation_prompt=True,
                return_dict=True,
            )
            ids = rendered["input_ids"]
            prompts[digest_of_value(ids)[:DIGITS]] = ids
    written = 0
    with (
        lzma.open(options.answers, "rt") as packed,
        open(options.out, "w") as chats,
    ):
        for index, line in enumerate(packed):
            record = json.loads(line)
            if record["prompt"] in prompts:
                chat = {
                    "prompt_token_ids": prompts[record["prompt"]],
                    "token_ids": record["token_ids"],
                    "finish_reason": record["end"],
                    "index": index,
                }
                chats.write(json.dumps(chat) + "\n")
                written += 1
    print(f"{options.out}: {written:,} chats")
    return 0

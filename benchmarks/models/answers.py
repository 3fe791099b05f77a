# SPDX-License-Identifier: Apache-2.0
"""The target's answers on which heads were trained, kept without the prompts, whose licences vary.

    python -m vllm_ppd.benchmarks.models pack --answers answers.jsonl --out answers.jsonl.xz
    python -m vllm_ppd.benchmarks.models unpack --answers answers.jsonl.xz --prompts prompts.jsonl --model M --out FILE

Each line of the packed file has the tokens of an answer and a digest of the prompt's tokens.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.heads.files import replaced

DIGITS = 16  # digits of a prompt's digest


class PackOptions(BaseModel):
    """Options for packing the answers of `ppd data --prompts`."""

    answers: str = Field(description=".jsonl of `ppd data`")
    out: str = Field(description=".jsonl.xz to write")


class UnpackOptions(BaseModel):
    """Options for joining packed answers with their prompts."""

    answers: str = Field(description=".jsonl.xz of `pack`")
    prompts: str = Field(description=".jsonl of prompts, in any order; answers to others are left out")
    model: str = Field(description="the target that answered, whose chat template renders the prompts")
    out: str = Field(description=".jsonl to write, for `ppd train --data`")


def digest(prompt: list[int]) -> str:
    """The digest of a prompt's tokens."""
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:DIGITS]


def pack(options: PackOptions) -> int:
    """Write the answers, each with the digest of its prompt."""
    with (
        Path(options.answers).open(encoding="utf-8") as chats,
        replaced(Path(options.out)) as new,
        lzma.open(new, "wt", preset=9) as packed,
    ):
        for line in chats:
            chat = json.loads(line)
            record = {
                "prompt": digest(chat["prompt_token_ids"]), "token_ids": chat["token_ids"],
                "end": chat["finish_reason"],
            }  # fmt: skip
            packed.write(json.dumps(record, separators=(",", ":")) + "\n")
    return 0


def unpack(options: UnpackOptions) -> int:
    """Write the chats as `ppd data` wrote them, without those whose prompts are missing.

    Raises:
        BenchError: if all prompts are missing.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    prompts = {}
    with Path(options.prompts).open(encoding="utf-8") as lines:
        for line in lines:
            messages = json.loads(line)["messages"]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            prompts[digest(ids)] = ids
    number = index = 0
    with replaced(Path(options.out)) as new, new.open("w") as chats, lzma.open(options.answers, "rt") as packed:
        for index, line in enumerate(packed, start=1):
            record = json.loads(line)
            if (ids := prompts.get(record["prompt"])) is not None:
                chat = {"prompt_token_ids": ids, "token_ids": record["token_ids"], "finish_reason": record["end"]}
                chats.write(json.dumps(chat | {"index": index - 1}) + "\n")
                number += 1
        if not number:
            raise BenchError(f"--prompts {options.prompts} has none of the prompts of {options.answers}")
    print(f"{options.out}: {number:,} chats, {index - number:,} without their prompt")
    return 0

# SPDX-License-Identifier: Apache-2.0
"""The target's answers that heads were trained on, kept without the prompts, whose licences vary.

    python -m vllm_ppd.benchmarks.models pack --answers answers.jsonl --prompts prompts.jsonl --out answers.jsonl.xz
    python -m vllm_ppd.benchmarks.models unpack --answers answers.jsonl.xz --prompts prompts.jsonl --model M --out FILE

Each line of the packed file has the tokens of an answer and a digest of the prompt's messages.
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

DIGITS = 16  # of a prompt's digest


class PackOptions(BaseModel):
    """Answers that `ppd data --prompts` wrote, and the prompts."""

    answers: str = Field(description=".jsonl of `ppd data`")
    prompts: str = Field(description="the .jsonl of prompts that it answered")
    out: str = Field(description=".jsonl.xz to write")


class UnpackOptions(BaseModel):
    """Packed answers, and the prompts."""

    answers: str = Field(description=".jsonl.xz of `pack`")
    prompts: str = Field(description=".jsonl of prompts, in any order; answers to others are left out")
    model: str = Field(description="the target that answered, whose chat template renders the prompts")
    out: str = Field(description=".jsonl to write, for `ppd train --data`")


def digests(prompts: str) -> list[tuple[str, Any]]:
    """(digest, messages) of each prompt of a file."""
    with Path(prompts).open(encoding="utf-8") as lines:
        messages = [json.loads(line)["messages"] for line in lines]
    return [(hashlib.sha256(json.dumps(m, sort_keys=True).encode()).hexdigest()[:DIGITS], m) for m in messages]


def pack(options: PackOptions) -> int:
    """Write the answers, each with the digest of its prompt."""
    names = [name for name, _ in digests(options.prompts)]
    with (
        Path(options.answers).open(encoding="utf-8") as chats,
        replaced(Path(options.out)) as new,
        lzma.open(new, "wt", preset=9) as packed,
    ):
        for line in chats:
            chat = json.loads(line)
            record = {"prompt": names[chat["index"]], "token_ids": chat["token_ids"], "end": chat["finish_reason"]}
            packed.write(json.dumps(record, separators=(",", ":")) + "\n")
    return 0


def unpack(options: UnpackOptions) -> int:
    """Write the chats as `ppd data` wrote them, without those whose prompts are not there.

    Raises:
        BenchError: if no prompt is there.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    prompts = dict(digests(options.prompts))
    number = 0
    with replaced(Path(options.out)) as new, new.open("w") as chats, lzma.open(options.answers, "rt") as packed:
        for index, line in enumerate(packed):
            record = json.loads(line)
            if (messages := prompts.get(record["prompt"])) is not None:
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
                chat = {
                    "prompt_token_ids": ids, "token_ids": record["token_ids"], "finish_reason": record["end"],
                    "index": index,
                }  # fmt: skip
                chats.write(json.dumps(chat) + "\n")
                number += 1
        if not number:
            raise BenchError(f"--prompts {options.prompts} has none of the prompts of {options.answers}")
    print(f"{options.out}: {number:,} chats, {index + 1 - number:,} without their prompt")
    return 0

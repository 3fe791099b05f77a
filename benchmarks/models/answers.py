# SPDX-License-Identifier: Apache-2.0
"""The target's answers on which heads were trained, kept without the prompts, whose
licences vary.

    python -m vllm_ppd.benchmarks.models unpack --answers answers.jsonl.xz --prompts
    prompts.jsonl \\
        --model M --out FILE

Each line of answers.jsonl.xz has the tokens of an answer and a digest of the prompt's
tokens.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

DIGITS = 16  # digits of a prompt's digest


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


def digest(prompt: list[int]) -> str:
    """The digest of a prompt's tokens."""
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:DIGITS]


def run(options: UnpackOptions) -> int:
    """Write the chats as `ppd data` wrote them, without those whose prompts are missing."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    prompts = {}
    for line in Path(options.prompts).read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        prompts[digest(rendered["input_ids"])] = rendered["input_ids"]
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

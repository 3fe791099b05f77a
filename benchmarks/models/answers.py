# SPDX-License-Identifier: Apache-2.0
"""The target's answers on which heads were trained, kept without the prompts, whose licences vary.

    python -m vllm_ppd.benchmarks.models unpack --answers answers.jsonl.xz --prompts prompts.jsonl --model M --out FILE

Each line of answers.jsonl.xz has the tokens of an answer and a digest of the prompt's tokens.
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


class UnpackOptions(BaseModel):
    """Options for joining packed answers with their prompts."""

    answers: str = Field(description=".jsonl.xz of answers")
    prompts: str = Field(description=".jsonl of prompts, in any order; answers to others are left out")
    model: str = Field(description="the target that answered, whose chat template renders the prompts")
    out: str = Field(description=".jsonl to write, for `ppd train --data`")


def digest(prompt: list[int]) -> str:
    """The digest of a prompt's tokens."""
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:DIGITS]


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
    with lzma.open(options.answers, "rt") as packed:
        records = [json.loads(line) for line in packed]
    known = [(index, record) for index, record in enumerate(records) if record["prompt"] in prompts]
    if not known:
        raise BenchError(f"--prompts {options.prompts} has none of the prompts of {options.answers}")
    with replaced(Path(options.out)) as new, new.open("w") as chats:
        for index, record in known:
            chat = {"prompt_token_ids": prompts[record["prompt"]], "token_ids": record["token_ids"]}
            chats.write(json.dumps(chat | {"finish_reason": record["end"], "index": index}) + "\n")
    print(f"{options.out}: {len(known):,} chats, {len(records) - len(known):,} without their prompt")
    return 0

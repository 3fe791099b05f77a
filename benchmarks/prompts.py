# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids, from .jsonl files."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ppd.benchmarks.storage import BenchError

SHORTEST = 4  # tokens
# Distance between two pieces of a long text, in pieces: their continuations should
# differ
STRIDE = 4


class Prompt(NamedTuple):
    """Token ids with the special tokens of a server's prompt, and the record's category."""

    ids: list[int]
    category: str = ""


def read_prompts(
    data: tuple[str, ...],
    model: str,
    longest: int,
    trust_remote_code: bool = False,
) -> list[Prompt]:
    """The prompts of all records in files; of each category and each long text one
    after the other in turn.

    A record has prompt_token_ids, messages (the prompt ends with the last user's),
    prompt, or text, which is cut into pieces of `longest` tokens. Other prompts that
    are longer are left out.

    Args:
        data: .jsonl files.
        model: its tokenizer is loaded unless all records are token ids.
        longest: most tokens of a prompt.
        trust_remote_code: run a tokenizer's own code.

    Raises:
        BenchError: if a file is missing or malformed, or no prompt is left.
    """
    tokenizer: Any = None
    turns: list[tuple[int, Prompt]] = []
    seen: Counter[str] = Counter()
    left_out = 0
    for record, place in read_records(data):
        if tokenizer is None and "prompt_token_ids" not in record:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                model, trust_remote_code=trust_remote_code
            )
        category = str(record.get("category", ""))
        for number, ids in enumerate(
            prompts_of(record, place, tokenizer, longest)
        ):
            if SHORTEST <= len(ids) <= longest:
                # The first pieces of all texts come before the second ones
                turn = number
                if category:
                    turn += seen[category]
                turns.append((turn, Prompt(ids, category)))
            else:
                left_out += 1
        seen[category] += 1
    if not turns:
        raise BenchError(
            f"{', '.join(data)}: none of {left_out} prompts has {SHORTEST} to "
            f"{longest} tokens; give other data, or more --prompt-tokens"
        )
    return [prompt for _, prompt in sorted(turns, key=lambda turn: turn[0])]


def read_records(data: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], str]]:
    for path in data:
        if not Path(path).is_file():
            raise BenchError(
                f"--data: there is no file {path}; give .jsonl files"
            )
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = dict(json.loads(line))
                except (ValueError, TypeError) as error:
                    raise BenchError(
                        f"{path}:{number} is no JSON object ({error}); give .jsonl "
                        "files"
                    ) from None
                yield record, f"{path}:{number}"


def prompts_of(
    record: dict[str, Any], place: str, tokenizer: Any, longest: int
) -> list[list[int]]:
    """The prompts of a record: of a text its pieces, otherwise one."""
    if "prompt_token_ids" in record:
        return [record["prompt_token_ids"]]
    if "messages" in record:
        messages = list(record["messages"])
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        return [rendered["input_ids"]]
    if isinstance(record.get("prompt"), str):
        return [tokenizer(record["prompt"])["input_ids"]]
    if isinstance(record.get("text"), str):
        ids = tokenizer(record["text"], add_special_tokens=False)["input_ids"]
        starts = range(0, max(1, len(ids) - longest + 1), STRIDE * longest)
        pieces = [
            tokenizer.decode(ids[start : start + longest]) for start in starts
        ]
        return [tokenizer(piece)["input_ids"][:longest] for piece in pieces]
    raise BenchError(
        f"{place} has none of prompt_token_ids, messages, prompt and text; give one "
        "of them"
    )

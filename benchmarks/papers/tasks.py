# SPDX-License-Identifier: Apache-2.0
"""What the tables are measured on: named files of chats, prompts or texts, and their categories.

A record with `messages` is a chat: its turns up to the last of the user, through the chat template, are the prompt. One
with `prompt_token_ids` is a prompt, as `ppd data` writes them. Other records are texts, whose middle gives prompts of
one length.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.heads.calibration.text import Texts, padded, take_prompts
from vllm_ppd.heads.data.files import JSON_SUFFIX, LINES_SUFFIXES, expand, lines, parse, values
from vllm_ppd.heads.quote import place
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

CHATS = ("messages", "conversations")
IDS = "prompt_token_ids"
# Our names of tasks and categories that stand for a data set of the papers.
COUNTERPARTS = {
    "SQUAD": ("squad", "qa"),
    "WMT EN-FR": ("wmt", "translation"),
    "CNN/DM": ("cnn/dm", "cnndm", "summarization"),
    "Text Summarization (XSum)": ("xsum", "summarization"),
    "Code Generation (HumanEval)": ("humaneval", "coding"),
    "Mathematical Reasoning (GSM8K)": ("gsm8k", "math_reasoning"),
}


@dataclass(frozen=True)
class Task:
    """Prompts of a name, shortest first."""

    name: str
    path: str
    prompts: list[list[int]]
    categories: dict[str, list[int]] = field(default_factory=dict)  # places of their prompts
    texts: bool = False  # documents to be cut, instead of prompts
    left_out: int = 0  # prompts that were too long

    def padded(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts at the right of [prompts, longest], and where each begins."""
        ids, starts = padded(self.prompts, device)
        assert starts is not None
        return ids, starts


class Group(NamedTuple):
    """A task, or a category of it."""

    label: str
    task: Task
    rows: torch.Tensor  # [prompts of it] their places

    @property
    def whole(self) -> bool:
        return len(self.rows) == len(self.task.prompts)


def answers(texts: Texts, size: int) -> list[Batch]:
    """The generated part of texts, for likelihoods."""
    found = []
    for part, windows in texts.batches(size):
        ids = torch.cat([windows.input_ids, texts.ids[part, -1:]], dim=1)
        positions = torch.cat([windows.position_ids, windows.position_ids[:, -1:] + 1], dim=1)
        place = torch.arange(ids.shape[1], device=ids.device) - (ids.shape[1] - texts.generated.shape[1])
        counted = (place >= 0) & (place < texts.lengths[part, None])
        found.append(Batch(ids, positions, counted=counted))
    return found


def groups_of(tasks: list[Task]) -> list[Group]:
    """Every task, followed by its categories."""
    found = []
    for task in tasks:
        found.append(Group(task.name, task, torch.arange(len(task.prompts))))
        found += [Group(f"{task.name}/{name}", task, torch.tensor(at)) for name, at in task.categories.items()]
    return found


def counterpart(data_set: str, tasks: list[Task]) -> Group | None:
    """The task or category that stands for a data set of the papers."""
    wanted = (data_set.lower(), *COUNTERPARTS.get(data_set, ()))
    by_name = {group.label.lower().rpartition("/")[2]: group for group in reversed(groups_of(tasks))}
    by_name |= {task.name.lower(): group for task in tasks for group in groups_of([task])[:1]}
    return next((by_name[name] for name in wanted if name in by_name), None)


def named(text: str) -> tuple[str, str]:
    """The name and the file of NAME=FILE, or of FILE."""
    name, equals, path = text.partition("=")
    return (name, path) if equals and "/" not in name else (Path(text).stem, text)


def read_task(text: str, target: Target, most: int, longest: int, cut: int) -> Task:
    """A task of prompts, or of texts.

    Args:
        text: NAME=FILE.
        target: whose tokenizer and chat template are used.
        most: prompts at most; of texts exactly as many.
        longest: tokens of a prompt; longer ones are left out.
        cut: tokens of a prompt from the middle of a text.

    Raises:
        BenchError, TrainingError: if the file is missing or malformed, or holds too little.
    """
    found = read_prompts(text, target.tokenizer, most, longest)
    if found is not None:
        return found
    name, path = named(text)
    return Task(name, path, take_prompts([path], target, most, cut).tolist(), texts=True)


def read_prompts(text: str, tokenizer: Any, most: int | None, longest: int) -> Task | None:
    """Prompts of a task, taken from its categories in turns; None if the file holds texts.

    Args:
        text: NAME=FILE.
        tokenizer: the target's, with its chat template.
        most: prompts at most (None: all).
        longest: tokens of a prompt; longer ones are left out, as a part of a chat is no chat.

    Raises:
        BenchError, TrainingError: if the file is missing or malformed, or holds no prompt of that length.
    """
    name, path = named(text)
    found: dict[str, list[list[int]]] = defaultdict(list)
    left_out = 0
    for where, record in records(path):
        if not isinstance(record, dict) or not (any(column in record for column in CHATS) or IDS in record):
            return None
        ids = _prompt(record, where, tokenizer)
        if len(ids) <= longest:
            found[str(record.get("category", ""))].append(ids)
        left_out += len(ids) > longest
    turns = itertools.zip_longest(*([(category, ids) for ids in rows] for category, rows in found.items()))
    taken = [pair for turn in turns for pair in turn if pair is not None][:most]
    if not taken:
        raise BenchError(f"--task {name}: none of {left_out} prompts has up to {longest} tokens; give more --longest")
    taken.sort(key=lambda pair: len(pair[1]))
    categories = {one: [at for at, (own, _) in enumerate(taken) if own == one] for one in found if len(found) > 1}
    return Task(name, path, [ids for _, ids in taken], {k: v for k, v in categories.items() if v}, left_out=left_out)


def records(path: str) -> Iterator[tuple[str, Any]]:
    """(file and line, record) of a file or folder; the record of plain text is None."""
    for file in expand([path]):
        if file.suffix in LINES_SUFFIXES:
            for number, line in lines(file):
                if line.strip():
                    yield place(file, number), parse(line, place(file, number))
        elif file.suffix == JSON_SUFFIX:
            yield from ((place(file, number), value) for number, value in values(file))
        else:
            yield place(file), None


def _prompt(record: dict[str, Any], where: str, tokenizer: Any) -> list[int]:
    if IDS in record:
        return list(record[IDS])
    return list(tokenizer(rendered(record, where, tokenizer), add_special_tokens=False)["input_ids"])


def rendered(record: dict[str, Any], where: str, tokenizer: Any) -> str:
    """A chat through the model's template, up to the user's last turn.

    Raises:
        BenchError: if it is no chat for the template.
    """
    messages = next(record[column] for column in CHATS if column in record)
    try:
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        return str(tokenizer.apply_chat_template(messages[: last + 1], add_generation_prompt=True, tokenize=False))
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"{where}: no chat for this model's template ({type(error).__name__}: {error})") from None

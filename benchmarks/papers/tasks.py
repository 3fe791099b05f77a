# SPDX-License-Identifier: Apache-2.0
"""What the tables are measured on: named files of chats, prompts or texts, and their categories.

Chats, prompts and token ids are answered as records ask. Where one is a text, all are: prompts of one length come from
the middle of each.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.options import named
from vllm_ppd.heads.calibration.text import Texts, padded, take_prompts
from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.data.prompts import in_turns
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

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
    documents = Documents([path], lambda: tokenizer, report=False)
    for document in documents.tokens(prompts=True):
        if document.prompt_ids is None:
            return None
        if len(document.prompt_ids) <= longest:
            found[document.category].append(document.prompt_ids)
        left_out += len(document.prompt_ids) > longest
    documents.report_skips()
    taken = in_turns([(category, ids) for ids in rows] for category, rows in found.items())[:most]
    if not taken:
        raise BenchError(f"--task {name}: none of {left_out} prompts has up to {longest} tokens; give more --longest")
    taken.sort(key=lambda pair: len(pair[1]))
    categories = {one: [at for at, (own, _) in enumerate(taken) if own == one] for one in found if len(found) > 1}
    return Task(name, path, [ids for _, ids in taken], {k: v for k, v in categories.items() if v}, left_out=left_out)

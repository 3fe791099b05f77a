# SPDX-License-Identifier: Apache-2.0
"""What the tables are measured on: named files of chats, prompts or texts.

Chats, prompts and token ids are answered as records ask. Where a record is a text, all are: prompts of one length come
from the middle of each.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.options import named
from vllm_ppd.heads.calibration.text import Padded, Texts, padded, take_prompts
from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.data.prompts import document_prompts, in_turns
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch


@dataclass(frozen=True, eq=False)
class Task:
    """Prompts of a name, shortest first."""

    name: str
    path: str
    prompts: list[list[int]]
    texts: bool = False  # documents to be cut, instead of prompts
    left_out: int = 0  # prompts that were too long

    def padded(self, device: torch.device) -> Padded:
        """Prompts at the right of [prompts, longest], and where each begins."""
        return padded(self.prompts, device)


def answers(texts: Texts, size: int) -> list[Batch]:
    """The generated tokens of texts, for likelihoods, as batches of some size."""
    batches = []
    for rows, windows in texts.batches(size):
        ids = torch.cat([windows.input_ids, texts.ids[rows, -1:]], dim=1)
        positions = torch.cat([windows.position_ids, windows.position_ids[:, -1:] + 1], dim=1)
        place = torch.arange(ids.shape[1], device=ids.device) - (ids.shape[1] - texts.generated.shape[1])
        counted = (place >= 0) & (place < texts.lengths[rows, None])
        batches.append(Batch(ids, positions, counted=counted))
    return batches


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
    task = read_prompts(text, target.tokenizer, most, longest)
    if task is not None:
        return task
    name, path = named(text)
    return Task(name, path, take_prompts([path], target, most, cut).tolist(), texts=True)


def read_prompts(text: str, tokenizer: Any, most: int | None, longest: int) -> Task | None:
    """Prompts of a task, taken from its categories in turns; None if the file holds texts.

    Args:
        text: NAME=FILE.
        tokenizer: the target's, with its chat template.
        most: prompts at most (None: all).
        longest: tokens of a prompt; longer ones are left out, as a piece of a chat is no chat.

    Raises:
        BenchError, TrainingError: if the file is missing or malformed, or holds no prompt of that length.
    """
    name, path = named(text)
    by_category: dict[str, list[list[int]]] = defaultdict(list)
    left_out = 0
    documents = Documents([path], lambda: tokenizer, report=False)
    for document in document_prompts(documents, longest):
        if not document.is_asked:
            return None
        by_category[document.category] += [ids for ids in document.ids if len(ids) <= longest]
        left_out += sum(len(ids) > longest for ids in document.ids)
    documents.report_skips()
    taken = in_turns(by_category.values())[:most]
    if not taken:
        raise BenchError(f"--task {name}: none of {left_out} prompts has up to {longest} tokens; give more --longest")
    return Task(name, path, sorted(taken, key=len), left_out=left_out)

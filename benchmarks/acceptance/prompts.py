# SPDX-License-Identifier: Apache-2.0
"""All prompts of a file: those of chats, prompts and token ids, and pieces from the middle of each text."""

from collections import defaultdict
from dataclasses import dataclass

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.acceptance.options import AcceptanceOptions
from vllm_ppd.benchmarks.harness.options import named
from vllm_ppd.benchmarks.harness.prompts import load_tokenizer, read_prompts
from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.data.prompts import document_prompts, in_turns


@dataclass(frozen=True, eq=False)
class Task:
    """A named set of prompts: token ids by category, shortest first."""

    name: str
    prompts: dict[str, list[list[int]]]
    left_out: int = 0  # prompts that were too long

    def batches(self, size: int) -> list[tuple[str, list[list[int]]]]:
        """Batches of a limited number of prompts of a category, with its name."""
        return [
            (category, prompts[first : first + size])
            for category, prompts in self.prompts.items()
            for first in range(0, len(prompts), size)
        ]


def task_of(options: AcceptanceOptions) -> Task:
    """The prompts of --data, from its categories in turn; longer ones are left out, since a cut chat is no chat.

    Raises:
        BenchError, TrainingError: if the file is missing or malformed, or holds no prompt of up to --prompt-tokens.
    """
    if len(options.data) != 1:
        raise BenchError("--data: give a single file of chats, prompts or texts")
    (name, path), longest = named(options.data[0]), options.prompt_tokens
    tokenizer = load_tokenizer(options.model, options.trust_remote_code)
    by_category: dict[str, list[list[int]]] = defaultdict(list)
    left_out = 0
    documents = Documents([path], lambda: tokenizer, report=False)
    for document in document_prompts(documents, longest):
        if not document.is_asked:
            texts = read_prompts((path,), options.model, longest, options.prompts, options.trust_remote_code)
            return Task(name, {"": texts})
        by_category[document.category] += [ids for ids in document.ids if len(ids) <= longest]
        left_out += sum(len(ids) > longest for ids in document.ids)
    documents.report_skips()
    numbered = [[(category, ids) for ids in prompts] for category, prompts in by_category.items()]
    taken: dict[str, list[list[int]]] = defaultdict(list)
    for category, ids in sorted(in_turns(numbered)[: options.prompts], key=lambda prompt: len(prompt[1])):
        taken[category].append(ids)
    if not taken:
        raise BenchError(f"{path}: none of {left_out} prompts has up to {longest} tokens; give more --prompt-tokens")
    return Task(name, dict(sorted(taken.items())), left_out=left_out)

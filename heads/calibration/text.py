# SPDX-License-Identifier: Apache-2.0
"""Texts for measurements: what the target itself writes after prompts from the user's documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import GenerationConfig

from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.data.prompts import check_vocabulary, document_prompts, from_the_middle, in_turns
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.progress import Bar
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch
from vllm_ppd.kernels.unembedding_loss import rows_a_chunk


class Padded(NamedTuple):
    """Prompts, aligned to the right of their rows."""

    ids: torch.Tensor  # [prompts, longest] int64
    starts: torch.Tensor | None  # [prompts] where each prompt begins (None: all at 0)
    categories: tuple[str, ...] = ()  # of the prompts' records, if they have any


@dataclass
class Texts:
    """Prompts and what was generated after them; shorter prompts are aligned to the right."""

    ids: torch.Tensor  # [texts, prompt + generated] int64
    prompt: int  # tokens of the longest prompt
    lengths: torch.Tensor  # [texts] generated tokens, the end token included
    temperature: float  # at which the text was sampled; 0 is greedy
    starts: torch.Tensor | None = None  # [texts] where each prompt begins (None: all at 0)

    @property
    def generated(self) -> torch.Tensor:
        """[texts, generated]"""
        return self.ids[:, self.prompt :]

    def valid(self) -> torch.Tensor:
        """Which generated tokens are real: [texts, generated]."""
        steps = torch.arange(self.generated.shape[1], device=self.ids.device)
        return steps[None] < self.lengths[:, None]

    def batches(self, size: int) -> list[tuple[slice, Batch]]:
        """The texts as batches, one text a window."""
        batches = []
        for start in range(0, len(self.ids), size):
            some = slice(start, start + size)
            starts = self.starts[some] if self.starts is not None else torch.zeros(1, dtype=torch.int64)
            first = int(starts.min())
            ids = self.ids[some, first:-1]  # nothing reads the last token's state
            # A document begins at each position 0, so that padding is not part of what follows it.
            positions = torch.arange(ids.shape[1], device=ids.device) - (starts.to(ids.device) - first)[:, None]
            batches.append((some, Batch(ids, positions.clamp(min=0).expand(len(ids), -1))))
        return batches

    def reading(self, states: torch.Tensor, windows: Batch) -> torch.Tensor:
        """The states of a batch [tokens, hidden] that read each generated token: [texts * generated, hidden]."""
        return states.unflatten(0, windows.input_ids.shape)[:, -self.generated.shape[1] :].flatten(0, 1)

    def repeated_4_grams(self) -> float:
        """Share of generated 4-grams that occurred before in their text: loops flatter acceptance."""
        repeated = total = 0
        for row, length in zip(self.generated.tolist(), self.lengths.tolist(), strict=True):
            grams = [tuple(row[i : i + 4]) for i in range(length - 3)]
            repeated, total = repeated + len(grams) - len(set(grams)), total + len(grams)
        return round(repeated / max(total, 1), 4)


def ahead(
    values: torch.Tensor,  # [texts, steps]
    offsets: range,
    fill: float = 0,
) -> torch.Tensor:
    """The value at each offset after every step, `fill` past the end: [texts, steps, offsets]."""
    padded = functional.pad(values, (0, offsets[-1]), value=fill)
    return torch.stack([padded[:, i : i + values.shape[1]] for i in offsets], dim=-1)


def logits_at(target: Target, states: torch.Tensor, temperature: float) -> torch.Tensor:
    """The LM head's logits at a temperature (as for 1 where it is 0: the order is the same): [rows, vocabulary]."""
    logits = functional.linear(states.to(target.unembedding.dtype), target.unembedding, target.bias).float()
    return logits / temperature if temperature else logits


def log_prob_of(target: Target, states: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """log p of a token [rows] at each state [rows, hidden], at a temperature (as for 1 where it is 0): [rows]."""
    return ranked(target, states, tokens, temperature)[1]


def ranked(
    target: Target, states: torch.Tensor, tokens: torch.Tensor, temperature: float, are_logits: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tokens are likelier than a token [rows] at each state, and its log-probability as of log_prob_of.

    Args:
        target: the model.
        states: [rows, hidden], or [rows, vocabulary] where they are logits already.
        tokens: [rows]
        temperature: of the log-probabilities.
        are_logits: what the states are.
    """
    size = rows_a_chunk(target.unembedding)
    ranks, log_probs = [], []
    for some, ids in zip(states.split(size), tokens.split(size), strict=True):
        logits = some.float() / (temperature or 1.0) if are_logits else logits_at(target, some, temperature)
        logit = logits.gather(1, ids[:, None])
        ranks.append((logits > logit).sum(1))
        log_probs.append(logit.squeeze(1) - torch.logsumexp(logits, dim=-1))
    return torch.cat(ranks), torch.cat(log_probs)


def take_prompts(data: Sequence[str], target: Target, count: int, length: int, report: bool = True) -> torch.Tensor:
    """Prompts from the middle of documents, one per document first, then more of each: [count, length].

    Each begins with the special tokens that vLLM's server would add. `report` prints which records were skipped.

    Raises:
        TrainingError: if the data holds too little text.
    """
    rows = []
    documents = Documents(data, lambda: target.tokenizer, report)
    for ids in documents.token_ids():
        check_vocabulary(ids, target.vocab_size)
        pieces = documents.special.pieces(ids, length)
        if pieces:  # a document that is too short does not count as taken
            rows.append(from_the_middle(pieces))
        if len(rows) >= 4 * count:
            break
    prompts = in_turns(rows)[:count]
    if len(prompts) < count:
        raise TrainingError(
            f"the data has {len(prompts)} prompts of {length} tokens, but {count} are needed; give more data, or "
            "smaller --prompts or --prompt-tokens"
        )
    return torch.tensor(prompts, device=target.device)


def record_prompts(data: Sequence[str], target: Target, count: int, longest: int) -> Padded | None:
    """The prompts of records that hold prompts (chats, prompts, token ids). None if one of them is a text.

    Raises:
        TrainingError: if the data holds too few of at most `longest` tokens.
    """
    prompts: list[list[int]] = []
    categories: list[str] = []
    documents = Documents(data, lambda: target.tokenizer, report=False)
    for document in document_prompts(documents, longest):
        if not document.is_asked:
            return None
        (ids,) = document.ids
        check_vocabulary(ids, target.vocab_size)
        if 0 < len(ids) <= longest:
            prompts.append(ids)
            categories.append(document.category)
        if len(prompts) == count:
            documents.report_skips()
            return padded(prompts, target.device)._replace(categories=tuple(categories))
    skips = f" ({documents.skips()})" if documents.skipped else ""
    raise TrainingError(
        f"the data has {len(prompts)} prompts of up to {longest} tokens, but {count} are needed{skips}; give "
        "more data, or smaller --prompts"
    )


def padded(prompts: Sequence[list[int]], device: torch.device) -> Padded:
    """Prompts of any lengths at the right of one tensor."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
    starts = torch.tensor([width - len(prompt) for prompt in prompts])
    return Padded(ids.to(device), starts.to(device))


@torch.no_grad()
def generate(
    target: Target, prompts: torch.Tensor, tokens: int, temperature: float = 0.0, batch: int = 32,
    starts: torch.Tensor | None = None, **sampling: Any,
) -> Texts:  # fmt: skip
    """Let the target write after the prompts.

    Args:
        target: the model.
        prompts: [texts, prompt tokens].
        tokens: most tokens per text.
        temperature: 0 is greedy.
        batch: texts at a time.
        starts: [texts] where each prompt begins, behind padding (None: all at 0).
        sampling: top_k, top_p.
    """
    ends = end_tokens(target)
    padding = ends[0] if ends else 0
    how: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, **sampling}
    config = GenerationConfig(
        max_new_tokens=tokens, eos_token_id=ends or None, pad_token_id=padding, renormalize_logits=True, **how
    )
    outputs = []
    # Sort prompts by length: each batch is as wide as its longest prompt.
    order = torch.arange(len(prompts)) if starts is None else starts.argsort(descending=True, stable=True)
    for some in Bar(order.split(batch), desc="writing texts", mininterval=2, delay=2):
        first = 0 if starts is None else int(starts[some].min())
        chunk = prompts[some, first:]
        mask = torch.ones_like(chunk)
        if starts is not None:
            mask = (torch.arange(chunk.shape[1], device=chunk.device) >= (starts[some] - first)[:, None]).long()
        with _without_defaults(target.model):
            out = target.model.generate(chunk, attention_mask=mask, generation_config=config)
        padded = (first, prompts.shape[1] + tokens - first - out.shape[1])
        outputs.append(functional.pad(out, padded, value=padding))
    ids = torch.cat(outputs)[order.argsort()]
    generated = ids[:, prompts.shape[1] :]
    ended = torch.isin(generated, torch.tensor(ends, device=ids.device, dtype=ids.dtype))
    lengths = torch.where(ended.any(1), ended.float().argmax(1) + 1, generated.shape[1])
    return Texts(ids, prompts.shape[1], lengths, temperature, starts)


def end_tokens(target: Target) -> list[int]:
    """Tokens that end a text, as in vLLM: the tokenizer's, and those that generation_config.json adds to it."""
    more = getattr(target.model.generation_config, "eos_token_id", None)
    tokens = [target.tokenizer.eos_token_id, *(more if isinstance(more, list | tuple) else [more])]
    return list(dict.fromkeys(token for token in tokens if token is not None))


@contextmanager
def _without_defaults(model: Any) -> Iterator[None]:
    """A context without the defaults of the model's generation_config.json (penalties, banned n-grams, beams, ...).

    transformers fills in from it what a GenerationConfig leaves open, also one that is passed to generate().
    """
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before

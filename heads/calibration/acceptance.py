# SPDX-License-Identifier: Apache-2.0
"""Texts for measurements: what the target writes after prompts, how likely drafts are
accepted there, and how many an engine is expected to draft and accept along them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import GenerationConfig

from vllm_ppd.heads.data.documents import (
    Documents,
    check_vocabulary,
    document_prompts,
    in_turns,
)
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.planning import Counts
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

WRITTEN_TOGETHER = 32  # texts


@dataclass
class Texts:
    """Prompts, aligned to the right, and what was generated after them."""

    ids: Tensor  # [texts, prompt + generated] int64
    prompt: int  # tokens of the longest prompt
    lengths: Tensor  # [texts] generated tokens, the end token included
    temperature: float  # at which the text was sampled; 0 is greedy
    starts: Tensor  # [texts] int64, where each prompt begins

    @property
    def generated(self) -> Tensor:
        """[texts, generated]"""
        return self.ids[:, self.prompt :]

    def batches(self, size: int) -> Iterator[tuple[slice, Batch]]:
        """The texts as batches, one text a window."""
        ids = self.ids[:, :-1]  # nothing reads the last token's state
        places = torch.arange(ids.shape[1], device=ids.device)
        # A document begins at each position 0, so that padding is not part of what
        # follows it.
        positions = (places - self.starts[:, None]).clamp(min=0)
        for start in range(0, len(ids), size):
            some = slice(start, start + size)
            yield some, Batch(ids[some], positions[some])

    def reading(self, states: Tensor, windows: Batch) -> Tensor:
        """The states of a batch that read each generated token.

        [tokens, hidden] -> [texts * generated, hidden]
        """
        by_text = states.unflatten(0, windows.input_ids.shape)
        return by_text[:, -self.generated.shape[1] :].flatten(0, 1)


def ahead(values: Tensor, offsets: range, fill: float = 0) -> Tensor:
    """The value at each offset after every step, `fill` past the end.

    [texts, steps] -> [texts, steps, offsets]
    """
    padded = functional.pad(values, (0, offsets[-1]), value=fill)
    return torch.stack(
        [padded[:, i : i + values.shape[1]] for i in offsets], dim=-1
    )


def logits_at(target: Target, states: Tensor, temperature: float) -> Tensor:
    """The LM head's logits over a temperature (over 1 where it is 0).

    [rows, hidden] -> [rows, vocabulary]
    """
    return target.logits(states) / (temperature or 1.0)


def acceptance(
    log_p: Tensor,  # [rows, vocabulary], the target's log-probabilities
    # [rows, vocabulary], the draft's; -inf outside a draft vocabulary
    log_q: Tensor,
    tokens: Tensor,  # [rows], what the target has written
    temperature: float,
) -> Tensor:
    """P(a draft is accepted | the target has written this token): [rows].

    Greedy drafts are accepted where they are the token. Sampled ones share the target's
    Gumbel noise: both take the arg-max of log-probability plus noise. The two are the
    token x with probability 1 / sum_i max(p_i / p_x, q_i / q_x), which is divided by
    p_x here, as x is known.
    """
    if not temperature:
        return (log_q.argmax(-1) == tokens).float()
    at_p = log_p.gather(1, tokens[:, None])
    at_q = log_q.gather(1, tokens[:, None]).clamp(min=-1e30)
    return torch.exp(
        -torch.logsumexp(torch.maximum(log_p, log_q + at_p - at_q), dim=-1)
    )


def take_prompts(
    data: Sequence[str], target: Target, count: int, length: int, longest: int
) -> list[list[int]]:
    """The prompts of records, and pieces of texts, the middle one of each text first.

    Args:
        data: files and folders.
        target: reads them.
        count: prompts.
        length: tokens of a piece of text, the special tokens of vLLM's server included.
        longest: tokens of a record's prompt at most.

    Raises:
        TrainingError: if the data holds too few.
    """
    rows = []
    documents = Documents(data, target.tokenizer)
    for _, prompts in document_prompts(documents, length):
        pieces = [ids for ids in prompts if 0 < len(ids) <= longest]
        for ids in pieces:
            check_vocabulary(ids, target.vocab_size)
        if pieces:
            # The beginnings of documents resemble each other.
            middle = len(pieces) // 2
            rows.append(pieces[middle:] + pieces[:middle])
        if len(rows) == count:
            break
    prompts = in_turns(rows)[:count]
    if len(prompts) < count:
        raise TrainingError(
            f"the data has {len(prompts)} prompts (of up to {longest} tokens, or "
            f"{length} of a text), but {count} are needed; add data, or lower "
            "--num-prompts or --prompt-tokens"
        )
    return prompts


@torch.no_grad()
def generate(
    target: Target,
    prompts: Sequence[list[int]],
    tokens: int,
    temperature: float = 0.0,
) -> Texts:
    """Let the target write after prompts.

    Args:
        target: the model.
        prompts: token IDs.
        tokens: most tokens per text.
        temperature: 0 is greedy.
    """
    ends = end_tokens(target)
    end = ends[0] if ends else 0
    config = GenerationConfig(
        max_new_tokens=tokens,
        eos_token_id=ends or None,
        pad_token_id=end,
        renormalize_logits=True,
        do_sample=temperature > 0,
        **({"temperature": temperature, "top_k": 0} if temperature else {}),
    )
    rows = [torch.tensor(prompt, device=target.device) for prompt in prompts]
    left: dict[str, Any] = {"batch_first": True, "padding_side": "left"}
    ids = pad_sequence(rows, padding_value=end, **left)
    mask = pad_sequence([torch.ones_like(row) for row in rows], **left)
    width = ids.shape[1]
    written = []
    defaults = target.model.generation_config
    try:
        # Transformers would fill in what the config leaves open: penalties, banned
        # n-grams, beams.
        target.model.generation_config = GenerationConfig()
        batches = torch.arange(len(prompts)).split(WRITTEN_TOGETHER)
        for some in tqdm(batches, desc="writing texts", delay=2):
            out = target.model.generate(
                ids[some], attention_mask=mask[some], generation_config=config
            )
            room = width + tokens - out.shape[1]
            written.append(functional.pad(out, (0, room), value=end))
    finally:
        target.model.generation_config = defaults
    ids = torch.cat(written)
    ended = torch.isin(ids[:, width:], torch.tensor(ends, device=ids.device))
    lengths = torch.where(ended.any(1), ended.float().argmax(1) + 1, tokens)
    return Texts(ids, width, lengths, temperature, width - mask.sum(1))


def end_tokens(target: Target) -> list[int]:
    """Tokens that end a text, as in vLLM: the tokenizer's, and those of generation_config.json."""
    more = getattr(target.model.generation_config, "eos_token_id", None)
    more = more if isinstance(more, list | tuple) else [more]
    tokens = [target.tokenizer.eos_token_id, *more]
    return list(dict.fromkeys(token for token in tokens if token is not None))


def replay(
    # [texts, steps, n] P(draft i is accepted | those before it were)
    accept: Tensor,
    lengths: Tensor,  # [texts] tokens of each text, at most steps + 1
    limit: Tensor
    | None = None,  # [texts, steps] drafts that a step makes there (None: n)
) -> Counts:
    """Expected drafts and acceptances of an engine that emits exactly these texts.

    A step that starts at position t has emitted token t and drafts the n tokens after
    it. The next step starts after the accepted tokens and the bonus token. Starts are
    followed as probability mass over positions, exactly and without drawing.
    """
    texts, steps, n = accept.shape
    accept = accept.double()
    mass = torch.zeros(
        texts, steps + n + 1, dtype=torch.float64, device=accept.device
    )
    mass[:, 0] = 1
    totals = torch.zeros(4, dtype=torch.float64, device=accept.device)
    for t in range(steps):
        # The engine does not draft beyond the text's end, whose last token is the bonus
        # token.
        room = (lengths - t - 2).clamp(0, n)
        if limit is not None:
            room = torch.minimum(room, limit[:, t])
        allowed = torch.arange(n, device=accept.device)[None] < room[:, None]
        # [texts, n] first i + 1 accepted
        survive = torch.cumprod(accept[:, t] * allowed, dim=1)
        here = mass[:, t]
        alive = here * (t < lengths - 1)
        accepted = alive * survive.sum(1)
        counts = (alive, alive * (room > 0), alive * room, accepted)
        totals += torch.stack([count.sum() for count in counts])
        at_least = functional.pad(survive, (1, 0), value=1.0)  # [texts, n + 1]
        exactly = at_least - functional.pad(survive, (0, 1))
        mass[:, t + 1 : t + n + 2] += here[:, None] * exactly
    cycles, drafts, drafted, accepted = totals.tolist()
    return Counts(
        cycles=cycles,
        drafts=drafts,
        drafted=drafted,
        accepted=accepted,
        rate=round(accepted / max(drafted, 1e-9), 4),
        length=round(1 + accepted / max(drafts, 1e-9), 4),
    )

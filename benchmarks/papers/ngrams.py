# SPDX-License-Identifier: Apache-2.0
"""DynaMo's own decoding (Algorithm 1, unverified) on transformers, for ablations that no server offers.

Rows emit 1 to n tokens a pass, so the KV cache has holes: places of shorter rows, which the attention mask leaves out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from vllm_ppd.heads.calibration.text import Texts
from vllm_ppd.heads.dynamo.config import JointSettings
from vllm_ppd.heads.dynamo.joint import select
from vllm_ppd.heads.dynamo.measures import DynaMoMeasures


class Emitted(NamedTuple):
    """Texts, and how they came about."""

    texts: Texts
    passes: torch.Tensor  # [texts, n] that emitted 1, 2, ... n tokens

    def tokens_a_pass(self) -> float:
        """The speed-up if a pass costs what the target's costs."""
        sizes = torch.arange(1, self.passes.shape[1] + 1)
        return float((self.passes * sizes).sum() / self.passes.sum().clamp(min=1))

    def rows(self, rows: slice) -> Emitted:
        """Some of the texts."""
        return Emitted(self.texts.rows(rows), self.passes[rows])


@torch.no_grad()
def emit(
    measures: DynaMoMeasures,
    prompts: torch.Tensor,  # [texts, prompt] int64
    tokens: int,
    settings: JointSettings,
    eps_b: torch.Tensor,  # [texts], in place of the settings'
    temperature: float,
    generator: torch.Generator,
    starts: torch.Tensor | None = None,  # [texts] where each prompt begins, behind padding (None: at 0)
) -> Emitted:
    """Write n-grams after prompts as they are sampled from the joint of all heads.

    A text ends after so many tokens, or with the end token. At eps_b 1 it is the target's own sample from its top-k.
    """
    texts, width = prompts.shape
    n, device = measures.heads.tokens, prompts.device
    end = measures.target.tokenizer.eos_token_id
    ids = torch.zeros(texts, width + tokens + 2 * n, dtype=torch.int64, device=device)
    ids[:, :width] = prompts
    written = torch.zeros(texts, dtype=torch.int64, device=device)
    lengths = torch.full_like(written, tokens)
    passes = torch.zeros(texts, n, device=device)
    going = torch.ones(texts, dtype=torch.bool, device=device)
    begin = torch.zeros_like(written) if starts is None else starts
    places, columns = torch.arange(ids.shape[1], device=device), torch.arange(n, device=device)
    states_of, newest, real = CachedStates(measures, texts), prompts, places[:width] >= begin[:, None]
    with tqdm(total=tokens, desc="writing n-grams", mininterval=2, delay=2, leave=False) as progress:
        while bool(going.any()):
            states = states_of(newest, real)
            seen = ids[:, : width + int(written.max())]
            place = places[: seen.shape[1]]
            seen = seen.masked_fill((place < begin[:, None]) | (place >= width + written[:, None]), -1)
            grams = torch.full((texts, n), -1, device=device)
            for several in (False, True):
                waiting = torch.nonzero(going & ((eps_b < 1) == several)).squeeze(1)
                heads = states[: n if several else 1]  # at 1 the others are never asked
                for rows in waiting.split(measures.chunk(settings.k, len(heads))) if len(waiting) else ():
                    scores = [measures.log_probs(head[rows], temperature) for head in heads]
                    choice = select(scores, settings, measures.counts, eps_b=eps_b[rows], context=seen[rows])
                    grams[rows, : len(heads)] = choice.sample(generator)
            real, newest = grams >= 0, grams.clamp(min=0)
            place = (width + written)[:, None] + columns
            ids.scatter_(1, place, torch.where(real, newest, ids.gather(1, place)))
            order = real.sum(1)
            passes += (order[:, None] == columns + 1) & going[:, None]
            ended = real & (newest == end) if end is not None else torch.zeros_like(real)
            first = torch.where(ended, written[:, None] + columns + 1, tokens).amin(1)
            lengths = torch.where(going, torch.minimum(lengths, first), lengths)
            written += order
            going &= ~ended.any(1) & (written < tokens)
            longest = max(int(order.max()), 1)
            newest, real = newest[:, :longest], real[:, :longest]
            progress.update(int(written[going].min() if bool(going.any()) else tokens) - progress.n)
    return Emitted(Texts(ids[:, : width + tokens], width, lengths, temperature, starts), passes.cpu())


class CachedStates:
    """What the LM head reads for each head at every text's last token; earlier tokens stand in a KV cache."""

    def __init__(self, measures: DynaMoMeasures, texts: int) -> None:
        from transformers import DynamicCache

        self.measures, self.cache = measures, DynamicCache()
        device = measures.target.device
        self.mask = torch.zeros(texts, 0, dtype=torch.bool, device=device)
        self.count = torch.zeros(texts, 1, dtype=torch.int64, device=device)
        module: Any
        for token, layer in measures.heads.layers.items():
            for module in layer.modules():
                if hasattr(module, "layer_idx"):  # copies of the last layer; each needs its place in the cache
                    module.layer_idx = measures.target.num_layers + int(token) - 2

    def __call__(self, tokens: torch.Tensor, real: torch.Tensor) -> list[torch.Tensor]:
        """Take in tokens [texts, width], those that are real: [texts, hidden] of each head, head 1 first."""
        target, heads = self.measures.target, self.measures.heads
        self.mask = torch.cat([self.mask, real], dim=1)
        positions = (self.count + real.cumsum(1) - 1).clamp(min=0)
        self.count += real.sum(1, keepdim=True)
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((args, kwargs))

        hook = target.layers[-1].register_forward_pre_hook(record, with_kwargs=True)
        try:
            with self.measures.autocast():
                output = target.base(
                    input_ids=tokens, attention_mask=self.mask.long(), position_ids=positions,
                    past_key_values=self.cache, use_cache=True,
                )  # fmt: skip
                others = [target.norm(heads(token, *calls[0])) for token in range(2, heads.tokens + 1)]
        finally:
            hook.remove()
        last = (real * torch.arange(real.shape[1], device=real.device)).amax(1)
        index = torch.arange(len(last), device=last.device)
        return [states[index, last] for states in (output.last_hidden_state, *others)]

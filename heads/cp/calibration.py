# SPDX-License-Identifier: Apache-2.0
"""Measurements of CP heads: joint likelihood, perplexities by position (DynaMo, eq. 4), and expected acceptance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from vllm_ppd.heads.calibration.replay import Drafted, accepted_by_position, replay
from vllm_ppd.heads.calibration.session import Calibration
from vllm_ppd.heads.calibration.text import Texts, ahead, log_prob_of
from vllm_ppd.heads.cp.config import CPParts
from vllm_ppd.heads.cp.module import CPHead, mixtures
from vllm_ppd.heads.draft_vocabulary import columns
from vllm_ppd.heads.in_words import percent, table, vocabulary_table
from vllm_ppd.heads.measured import ByDrafts, Counts
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch
from vllm_ppd.kernels.cp_mixture import chain_log_likelihood
from vllm_ppd.kernels.unembedding_loss import rows_a_chunk, token_log_probs

ALL = "all"  # category for all prompts together
MakeHead = Callable[[Any, dict[str, torch.Tensor]], Any]  # from the configuration and the tensors


class CPMeasures:
    """A head and its target, which run in the arithmetic of the contexts that autocast() makes.

    The head is a CPHead, or one of another kind with the interface of a CPHead of rank 1 with a condition.
    """

    def __init__(self, target: Target, head: Any, autocast: Any) -> None:
        self.target, self.head, self.autocast = target, head, autocast

    def _chunks(self, hidden: torch.Tensor, tokens: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield as many rows at a time as fit memory, from states [rows, d] and tokens [rows, positions].

        Returns:
            (the rows, logits [rows, factors, r, vocabulary], log weights [rows, r]).
        """
        target, head = self.target, self.head
        size = max(1, rows_a_chunk(target.unembedding) // (head.factors * head.rank))
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            context = head.context(target, tokens[rows, : head.positions - 1])
            with self.autocast():
                logits = head.logits(hidden[rows], target.unembedding, target.bias, context)
                yield rows, logits, head.log_weights(hidden[rows], context)

    @torch.no_grad()
    def perplexities(self, batches: list[Batch]) -> dict[str, Any]:
        """Teacher-forced on the batches: joint nats, PPL_s of each position alone, PPL_1:s of the joint of the first s.

        With a condition the first position is the target's; only the others have what the head reads.
        """
        target, head, n = self.target, self.head, self.head.positions
        sums = torch.zeros(3, n, dtype=torch.float64)
        first = count = 0.0
        for batch in batches:
            with self.autocast():
                states = target.run(batch, head.layers)
            final, hidden = states.final, head.read(states)
            tokens, valid = batch.ahead(n)
            final, hidden, tokens = final[valid], hidden[valid], tokens[valid]
            count += len(hidden)
            for rows, logits, weights in self._chunks(hidden, tokens):
                index = tokens[rows, head.lead :, None, None].expand(-1, -1, head.rank, 1)
                observed = logits.float().log_softmax(-1).gather(-1, index).squeeze(-1)
                of_target = token_log_probs(final[rows], tokens[rows, 0], target.unembedding, target.bias)
                first -= float(of_target.sum())
                chain = chain_log_likelihood(weights, observed)
                alone = torch.logsumexp(weights[:, None] + observed, dim=-1)
                if head.lead:
                    chain, alone = (torch.cat([of_target[:, None], later], dim=1) for later in (chain, alone))
                sums += torch.stack([chain.sum(0), alone.sum(0), chain.cumsum(1).sum(0)]).cpu()
        means = (-sums / max(count, 1)).tolist()
        return {
            "joint_nats": round(means[2][-1], 4),
            "target_ppl_1": round(math.exp(first / max(count, 1)), 3),
            "ppl_n": [round(math.exp(value), 3) for value in means[1]],
            "ppl_1:n": [round(math.exp(value / s), 3) for s, value in enumerate(means[2], start=1)],
            "conditional_nats": [round(value, 4) for value in means[0]],
        }

    @torch.no_grad()
    def acceptance(self, texts: Texts, batch: int, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Probability that each draft is accepted if those before it were: [texts, generated tokens, n-1].

        Args:
            texts: of the target.
            batch: texts at a time.
            token_ids: [tokens] the draft vocabulary (None: the whole).
        """
        target, n, steps = self.target, self.head.positions - 1, texts.generated.shape[1]
        place = None if token_ids is None else columns(token_ids, target.vocab_size)
        accept = torch.zeros(len(texts.ids), steps, n)
        for some, windows in texts.batches(batch):
            with self.autocast():
                states = target.run(windows, self.head.layers)
            generated, hidden = texts.generated[some], texts.reading(self.head.read(states), windows)
            log_p = log_prob_of(
                target, texts.reading(states.final, windows), generated.flatten(), texts.temperature
            ).view_as(generated)
            tokens = ahead(generated, range(n + 1)).flatten(0, 1)
            targets = ahead(log_p, range(1, n + 1)).flatten(0, 1)
            chances = []
            for rows, logits, weights in self._chunks(hidden, tokens):
                logits = logits if token_ids is None else logits[..., token_ids]
                known = tokens[rows] if place is None else place[tokens[rows]]
                chances.append(_chances(logits, weights, known, targets[rows], texts.temperature).cpu())
            accept[some] = torch.cat(chances).view(-1, steps, n)
        return accept

    def drafted(self, texts: Texts, batch: int, token_ids: torch.Tensor | None = None) -> list[Drafted]:
        """An engine's expected counts on these texts with 1, 2, ... n-1 drafts; arguments as of acceptance."""
        return replays(self.acceptance(texts, batch, token_ids), texts.lengths.cpu())


def replays(accept: torch.Tensor, lengths: torch.Tensor) -> list[Drafted]:
    """An engine's expected counts with 1, 2, ... n drafts; arguments as of replay."""
    return [replay(accept[:, :, :m], lengths) for m in range(1, accept.shape[2] + 1)]


def _chances(
    logits: torch.Tensor,  # [rows, factors, r, vocabulary], for all positions or all but the first
    weights: torch.Tensor,  # [rows, r] log weights before the first position
    tokens: torch.Tensor,  # [rows, positions] columns of the sampled token and the tokens after it; -1 outside
    log_p: torch.Tensor,  # [rows, positions - 1] the target's log-probabilities of the tokens after the sampled one
    temperature: float,
) -> torch.Tensor:
    """Probability that each draft is accepted if those before it were: [rows, positions - 1]."""
    chances = []
    for position, log_q in enumerate(mixtures(logits, weights, tokens), start=1):
        token = tokens[:, position]
        if temperature:
            log_q = torch.log_softmax(log_q / temperature, dim=-1).gather(1, token.clamp(min=0)[:, None]).squeeze(1)
            chances.append((log_q - log_p[:, position - 1]).exp().clamp(max=1) * (token >= 0))
        else:
            chances.append((log_q.argmax(-1) == token).float())
    return torch.stack(chances, dim=1)


def measures_of(calibration: Calibration, make: MakeHead = CPHead.from_tensors) -> CPMeasures:
    target = calibration.target
    head = make(calibration.config, calibration.tensors).to(target.device, target.dtype)
    return CPMeasures(target, head, calibration.autocast)


def _stored(drafted: list[Drafted]) -> list[Counts]:
    return [Counts(**by.stored()) for by in drafted]


def acceptance(calibration: Calibration, make: MakeHead) -> dict[str, ByDrafts]:
    """Expected acceptance on greedy and sampled texts, of all prompts and of each category of them."""
    measures, categories = measures_of(calibration, make), calibration.prompts.categories
    rows = {ALL: list(range(len(calibration.prompts.ids)))}
    for category in dict.fromkeys(filter(None, categories)):
        rows[category] = [row for row, other in enumerate(categories) if other == category]
    measured = {}
    for name, texts in calibration.texts():
        accept, lengths = measures.acceptance(texts, calibration.options.batch), texts.lengths.cpu()
        by_category = {key: accepted_by_position(accept[some], lengths[some]) for key, some in rows.items()}
        measured[name] = ByDrafts(
            by_drafts=_stored(replays(accept, lengths)), repeated_4_grams=texts.repeated_4_grams(),
            by_category={key: [round(share, 4) for share in shares] for key, shares in by_category.items()},
        )  # fmt: skip
    return measured


def vocabulary(calibration: Calibration, make: MakeHead) -> dict[int, ByDrafts]:
    """Expected acceptance on sampled texts with shorter draft vocabularies."""
    measures, texts, batch = measures_of(calibration, make), calibration.sampled, calibration.options.batch
    return {
        len(ids): ByDrafts(by_drafts=_stored(measures.drafted(texts, batch, ids)), covers=share)
        for ids, share in calibration.vocabularies()
    }


def parts_measured(make: MakeHead) -> dict[str, Callable[[Calibration], Any]]:
    """The measurements of heads that `make` builds, by the names of CPParts."""
    return {
        "timing": Calibration.timing,
        "likelihood": lambda calibration: measures_of(calibration, make).perplexities(calibration.windows),
        "acceptance": partial(acceptance, make=make),
        "vocabulary": partial(vocabulary, make=make),
    }


PARTS = parts_measured(CPHead.from_tensors)


def category_tables(acceptance: Mapping[str, ByDrafts]) -> Iterator[str]:
    """Markdown of the drafts that are accepted at each position, by category of the prompts where they have any."""
    for name, by in acceptance.items():
        if by.by_category:
            yield f"Drafts accepted per step, by position, {name if name == 'greedy' else 'sampled at ' + name}"
            yield table(["prompts", *(f"draft {n}" for n in range(1, len(by.by_drafts) + 1)), "per step"], [
                [category, *(f"{share:.3f}" for share in shares), f"{sum(shares):.3f}"]
                for category, shares in by.by_category.items()
            ])  # fmt: skip


def tables(parts: CPParts) -> Iterator[str]:
    """Markdown of what was measured."""
    measured = parts.likelihood
    n = len(measured["ppl_n"])
    yield f"Joint of {n} tokens: {measured['joint_nats']} nats; the target's PPL_1 is {measured['target_ppl_1']}"
    rows = {"PPL_s": "ppl_n", "PPL_1:s": "ppl_1:n", "nats given the earlier ones": "conditional_nats"}
    yield table(["", *(f"s={s}" for s in range(1, n + 1))], [[name, *measured[key]] for name, key in rows.items()])
    yield "Expected drafts accepted per step (vLLM's terms: chain drafts, length = 1 + accepted / drafts)"
    yield table(["texts", "drafts", "rate", "accepted per step", "length", "repeated 4-grams"], [
        [name, n, percent(c.rate), f"{c.length - 1:.3f}", f"{c.length:.3f}", by.repeated_4_grams]
        for name, by in parts.acceptance.items() for n, c in enumerate(by.by_drafts, start=1)
    ])  # fmt: skip
    yield from category_tables(parts.acceptance)
    yield from vocabulary_table({size: (by.covers, by.by_drafts) for size, by in parts.vocabulary.items()})

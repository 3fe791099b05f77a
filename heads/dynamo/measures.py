# SPDX-License-Identifier: Apache-2.0
"""Measures of DynaMo heads: perplexities (eq. 4), PPL_d, and the drafts that an engine would accept."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from vllm_ppd.heads.calibration.replay import Drafted, replay
from vllm_ppd.heads.calibration.text import Texts, ahead, log_prob_of, logits_at
from vllm_ppd.heads.dynamo.config import JointSettings
from vllm_ppd.heads.dynamo.joint import candidates
from vllm_ppd.heads.dynamo.module import DynaMoHeads
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch
from vllm_ppd.kernels.joint import Ngrams
from vllm_ppd.kernels.unembedding_loss import token_log_probs

JOINT_ELEMENTS = 1 << 23  # most entries of joints in memory


class DynaMoMeasures:
    """The heads of a checkpoint on a target."""

    def __init__(self, target: Target, heads: DynaMoHeads, ngrams: Ngrams | None, autocast: Any) -> None:
        self.target, self.heads, self.ngrams, self.autocast = target, heads, ngrams, autocast

    @torch.no_grad()
    def states(self, batch: Batch) -> list[torch.Tensor]:
        """The states that the LM head reads for each head, head 1 first: [tokens, hidden] each."""
        target = self.target
        with self.autocast():
            run = target.run(batch, stem=True)
            assert run.stem is not None
            args, kwargs = run.stem
            others = [
                target.norm(self.heads(token, args, kwargs)).flatten(0, 1) for token in range(2, self.heads.tokens + 1)
            ]
        return [run.final, *others]

    def log_probs(
        self, states: torch.Tensor, temperature: float = 0.0, token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[rows, vocabulary] or of some tokens; at a temperature (as for 1 where it is 0: the order is the same)."""
        logits = logits_at(self.target, states, temperature)
        return torch.log_softmax(logits if token_ids is None else logits[:, token_ids], dim=-1)

    def chunk(self, k: int, order: int) -> int:
        return max(1, JOINT_ELEMENTS // k**order)

    @torch.no_grad()
    def perplexities(self, batches: list[Batch]) -> dict[str, Any]:
        """PPL_i of each head and PPL_1:i of the independent product (eq. 2 and 4)."""
        n = self.heads.tokens
        sums, rows = torch.zeros(n, dtype=torch.float64), 0
        for batch in batches:
            tokens, valid = batch.ahead(n)
            rows += int(valid.sum())
            for i, states in enumerate(self.states(batch)):
                log_probs = token_log_probs(states[valid], tokens[valid, i], self.target.unembedding, self.target.bias)
                sums[i] -= float(log_probs.sum())
        nats = (sums / max(rows, 1)).tolist()
        return {
            "joint_nats": round(sum(nats), 4),
            "ppl_n": [round(math.exp(value), 3) for value in nats],
            "ppl_1:n": [round(math.exp(sum(nats[:i]) / i), 3) for i in range(1, n + 1)],
        }

    @torch.no_grad()
    def dynamic_perplexity(
        self, batches: list[Batch], settings: JointSettings, eps_b: Sequence[float]
    ) -> list[dict[str, Any]]:
        """PPL_d (appendix C.4) by back-off threshold: along the text, as many tokens at a time as Algorithm 1 takes.

        Returns:
            PPL_d, tokens a forward pass (the paper's speed-up), and the share of uni-, bi- and trigrams (Fig. 5).
        """
        n, counts = self.heads.tokens, len(eps_b)
        nats = torch.zeros(counts, dtype=torch.float64)
        taken = torch.zeros(counts, n, dtype=torch.float64)
        for batch in batches:
            states, shape = self.states(batch), batch.input_ids.shape
            tokens, valid = batch.ahead(n)
            order = torch.ones(counts, len(valid), dtype=torch.int64)
            order[:, valid.cpu()] = self._orders([s[valid] for s in states], settings, eps_b).cpu()
            order = order.view(counts, *shape)
            observed = torch.stack(
                [
                    token_log_probs(s, tokens[:, i], self.target.unembedding, self.target.bias)
                    for i, s in enumerate(states)
                ]
            )
            summed = observed.double().cumsum(0).view(n, *shape).cpu()
            walked = _walk(order, summed, valid.view(shape).cpu())
            nats -= walked[0]
            taken += walked[1]
        return [_dynamic(*figures) for figures in zip(eps_b, nats.tolist(), taken, strict=True)]

    def _orders(self, states: list[torch.Tensor], settings: JointSettings, eps_b: Sequence[float]) -> torch.Tensor:
        """Tokens that Algorithm 1 takes from each state: [thresholds, tokens]."""
        chunk = self.chunk(settings.k, len(states))
        orders = []
        for at in range(0, len(states[0]), chunk):
            joint = candidates([self.log_probs(s[at : at + chunk]) for s in states], settings, self.ngrams)
            orders.append(torch.stack([joint.back_off(_at(settings, eps)).order for eps in eps_b]))
        return torch.cat(orders, dim=1)

    @torch.no_grad()
    def drafted(
        self,
        texts: Texts,
        settings: JointSettings,
        batch: int,
        eps_b: Sequence[float],
        token_ids: torch.Tensor | None = None,  # [tokens] the draft vocabulary (None: all tokens)
    ) -> dict[tuple[float, int], Drafted]:
        """An engine's expected counts on these texts in verified mode, by back-off threshold and most drafts.

        Greedy texts: the joint's best n-gram is drafted, and accepted as far as it is the text. Sampled texts: n-grams
        are drawn from the joint, and a token of the text was accepted with probability min(1, q/p).
        """
        n, steps = self.heads.tokens, texts.generated.shape[1]
        settings_of = {(eps, drafts): _at(settings, eps) for eps in eps_b for drafts in range(1, n)}
        accept = {key: torch.zeros(len(texts.ids), steps, key[1]) for key in settings_of}
        limit = {key: torch.zeros(len(texts.ids), steps, dtype=torch.int64) for key in settings_of}
        for some, windows in texts.batches(batch):
            generated = texts.generated[some]
            states = [texts.reading(s, windows) for s in self.states(windows)]
            log_p = log_prob_of(self.target, states[0], generated.flatten(), texts.temperature).view_as(generated)
            tokens = ahead(generated, range(n), fill=-2).flatten(0, 1)
            targets = ahead(log_p, range(1, n)).flatten(0, 1)
            size = self.chunk(settings.k, n - 1)
            for at in range(0, len(tokens), size):
                here = slice(at, at + size)
                heads = [self.log_probs(s[here], texts.temperature, token_ids) for s in states[1:]]
                joint = candidates(heads, settings, self.ngrams, tokens[here, 0], token_ids)
                index = torch.arange(at, at + len(heads[0]))
                place = index // steps, index % steps
                for key, asked in settings_of.items():
                    choice = joint.back_off(asked, most=key[1] + 1)
                    text = tokens[here, : key[1] + 1]
                    if texts.temperature:
                        chance = (choice.probabilities(text).log() - targets[here, : key[1]]).exp().clamp(max=1)
                    else:
                        chance = (choice.likeliest.tokens == text)[:, 1:].float()
                    accept[key][some][place] = chance.cpu()
                    limit[key][some][place] = (choice.order - 1).cpu()
        return {key: replay(accept[key], texts.lengths.cpu(), limit[key]) for key in settings_of}


def _at(settings: JointSettings, eps_b: float) -> JointSettings:
    return settings.model_copy(update={"eps_b": eps_b})


def _walk(
    order: torch.Tensor,  # [thresholds, windows, length] tokens taken at each position
    summed: torch.Tensor,  # [n, windows, length] log-probability of the next 1, 2, ... n tokens
    valid: torch.Tensor,  # [windows, length] whether the n tokens after a position are in its document
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode along each window from its first position; after the end of a document continue with the next one.

    Returns the summed log-probabilities of the n-grams taken [thresholds], and passes by tokens taken [thresholds, n].
    """
    counts, windows, length = order.shape
    total = torch.zeros(counts, dtype=torch.float64)
    taken = torch.zeros(counts, len(summed), dtype=torch.float64)
    threshold, window = torch.meshgrid(torch.arange(counts), torch.arange(windows), indexing="ij")
    at = torch.zeros(counts, windows, dtype=torch.int64)
    while bool((at < length).any()):
        place = at.clamp(max=length - 1)
        real = (at < length) & valid[window, place]
        size = torch.where(real, order[threshold, window, place], 1)
        total += (summed[size - 1, window, place] * real).sum(1)
        taken.scatter_add_(1, size - 1, real.double())
        at += size
    return total, taken


def _dynamic(eps_b: float, nats: float, taken: torch.Tensor) -> dict[str, Any]:
    """The figures for one threshold, from the nats of the text and how often 1, 2, ... tokens were taken."""
    passes = max(float(taken.sum()), 1)
    tokens = float((taken * torch.arange(1, len(taken) + 1)).sum())
    return {
        "eps_b": eps_b,
        "ppl_d": round(math.exp(nats / max(tokens, 1)), 3),
        "tokens_a_pass": round(tokens / passes, 4),
        "share": [round(value / passes, 4) for value in taken.tolist()],
    }

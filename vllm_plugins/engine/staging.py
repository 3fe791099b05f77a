# SPDX-License-Identifier: Apache-2.0
"""The drafter's inputs of a step, in buffers of fixed place: CUDA graphs read them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.engine.drafter import Drafter, DraftInputs
from vllm_ppd.vllm_plugins.engine.requests import RequestOptions
from vllm_ppd.vllm_plugins.engine.target import Target

Kind = Literal["greedy", "sampled", "truncated"]
GREEDY: Kind = "greedy"  # every draft is the best token
SAMPLED: Kind = "sampled"  # drafts are drawn at the requests' temperatures
TRUNCATED: Kind = "truncated"  # ... from what top-k and top-p leave, which sorts the vocabulary
KINDS: tuple[Kind, ...] = (GREEDY, SAMPLED, TRUNCATED)


class Staging:
    """Inputs of up to so many requests.

    Args:
        requests: the largest batch.
        num_drafts: K.
        target, drafter: loaded.
        options: of the request rows.
        reads_eps_b: whether the drafter reads the requests' back-off thresholds.
    """

    def __init__(
        self,
        requests: int,
        num_drafts: int,
        target: Target,
        drafter: Drafter,
        options: RequestOptions,
        reads_eps_b: bool,
    ) -> None:
        self.num_drafts, self.vocab_size = num_drafts, target.vocab_size
        self.options, self.reads_eps_b = options, reads_eps_b
        device = target.device

        def integers() -> torch.Tensor:
            return torch.zeros(requests, dtype=torch.int64, device=device)

        self.rows = integers()  # request row of each; -1 for padding
        self.newest_ids, self.places, self.max_drafts, self.positions = (integers() for _ in range(4))
        self.hidden = torch.zeros(requests, target.hidden_size, dtype=target.dtype, device=device)
        self.temperature = torch.ones(requests, device=device)  # as the request has it
        self.draft_temperature = torch.ones(requests, device=device)  # 0 where its drafts must be greedy
        self.top_k = torch.full((requests,), target.vocab_size, dtype=torch.int64, device=device)
        self.top_p = torch.ones(requests, device=device)
        self.eps_b = torch.full((requests,), torch.nan, device=device)
        self.context: torch.Tensor | None = None
        if drafter.context_tokens:
            shape = (requests, drafter.context_tokens)
            self.context = torch.full(shape, -1, dtype=torch.int64, device=device)

    def clear(self) -> None:
        """Stage nothing but padding."""
        self.rows.fill_(-1)

    def stage_nobody(self) -> None:
        """Stage padding that takes the way of sampling requests, as in a dummy run."""
        self.clear()
        self.temperature.fill_(1.0)
        self.draft_temperature.fill_(1.0)
        self.max_drafts.fill_(self.num_drafts)

    def stage(
        self,
        kind: Kind,
        rows: torch.Tensor,  # [requests] request rows; -1 for padding
        newest_ids: torch.Tensor,  # [requests] the last token that each emitted
        hidden: torch.Tensor,  # [tokens, hidden] normed states of the step
        places: torch.Tensor,  # [requests] int64, the token whose state gave the newest one
        positions: torch.Tensor,  # [requests] of the newest tokens
        max_drafts: torch.Tensor,  # [requests]
        sampling: Sampling | None,  # of the requests, as vLLM has it; None where the kind is greedy
    ) -> None:
        """Stage a step that was verified: what drafts of a kind read."""
        n = len(rows)
        self.rows[:n], self.places[:n], self.positions[:n] = rows, places, positions
        self.newest_ids[:n], self.max_drafts[:n] = newest_ids, max_drafts
        torch.index_select(hidden, 0, places, out=self.hidden[:n])
        options = self.options.on_device
        if kind != GREEDY:
            assert sampling is not None
            self.temperature[:n] = sampling.temperature
            self.draft_temperature[:n] = self.temperature[:n].masked_fill(options["drafts_greedily"][rows], 0.0)
        if kind == TRUNCATED:
            assert sampling is not None
            self.top_k[:n] = self.vocab_size if sampling.top_k is None else sampling.top_k
            self.top_p[:n] = 1.0 if sampling.top_p is None else sampling.top_p
        if self.reads_eps_b:
            self.eps_b[:n] = options["eps_b"][rows]

    def inputs(
        self,
        requests: int,
        kind: Kind,
        num_drafts: int,
        shallow: Callable[[int, torch.Tensor], CutState] | None,
        with_confidence: bool,
    ) -> DraftInputs:
        """The first so many of the staged requests as a drafter reads them; arguments as DraftInputs'."""
        sampling = None
        if kind != GREEDY:
            limits = (self.top_k[:requests], self.top_p[:requests]) if kind == TRUNCATED else ()
            sampling = Sampling(self.draft_temperature[:requests], *limits)
        return DraftInputs(
            newest_ids=self.newest_ids[:requests],
            hidden=self.hidden[:requests],
            places=self.places[:requests],
            max_drafts=self.max_drafts[:requests],
            num_drafts=num_drafts,
            sampling=sampling,
            shallow=shallow,
            options={"eps_b": self.eps_b[:requests]} if self.reads_eps_b else {},
            context=None if self.context is None else self.context[:requests],
            with_confidence=with_confidence,
        )

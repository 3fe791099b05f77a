# SPDX-License-Identifier: Apache-2.0
"""The drafter's inputs of a step, gathered by request row into buffers of fixed place: CUDA graphs read them there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from vllm_ppd.kernels.sampling import Sampling

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.drafting.drafter import Drafter
    from vllm_ppd.vllm_plugins.engine.v2.requests import RequestOptions
    from vllm_ppd.vllm_plugins.engine.v2.speculator import Speculator

Kind = Literal["greedy", "sampled", "truncated"]
GREEDY: Kind = "greedy"  # every draft is the best token
SAMPLED: Kind = "sampled"  # at the requests' temperatures
TRUNCATED: Kind = "truncated"  # ... and cut to their top-k and top-p, which sorts the vocabulary
KINDS: tuple[Kind, ...] = (GREEDY, SAMPLED, TRUNCATED)


class Staging:
    """A row for each request of the batch.

    Args:
        speculator: whose inputs they are.
    """

    def __init__(self, speculator: Speculator) -> None:
        self.speculator = speculator
        most, device = speculator.max_num_reqs, speculator.device

        def integers() -> torch.Tensor:
            return torch.zeros(most, dtype=torch.int64, device=device)

        self.rows = integers()  # request row of each; -1 for padding
        self.newest_ids, self.places, self.max_drafts, self.positions = (integers() for _ in range(4))
        self.hidden = torch.zeros(most, speculator.hidden_size, dtype=speculator.dtype, device=device)
        self.temperature = torch.ones(most, device=device)  # as the request has it
        self.draft_temperature = torch.ones(most, device=device)  # 0 where its drafts must be greedy
        self.top_k = torch.full((most,), speculator.vocab_size, dtype=torch.int64, device=device)
        self.top_p = torch.ones(most, device=device)
        self.eps_b = torch.full((most,), torch.nan, device=device)
        self.context: torch.Tensor | None = None

    def load(self, drafter: Drafter) -> None:
        """Allocate what only some drafters read."""
        if drafter.context_tokens:
            shape = (len(self.rows), drafter.context_tokens)
            self.context = torch.full(shape, -1, dtype=torch.int64, device=self.rows.device)

    def clear(self) -> None:
        """Stage nothing but padding."""
        self.rows.fill_(-1)

    def kind(self, batch: Any) -> Kind:
        """How the step's drafts are drawn, by what the host knows of its requests."""
        if self.speculator.q_rows is None:
            return GREEDY
        states, rows = self.speculator.runner.sampler.sampling_states, batch.idx_mapping_np
        options: RequestOptions = self.speculator.requests
        sampled = (states.temperature.np[rows] != 0) & ~options.greedy.np[rows]
        if not sampled.any():
            # Rows with a seed or a grammar have one-hot q(x).
            return SAMPLED if (states.temperature.np[rows] != 0).any() else GREEDY
        cut = (states.top_k.np[rows] != states.vocab_size) | (states.top_p.np[rows] != 1)
        return TRUNCATED if (cut & sampled).any() else SAMPLED

    def sampling(self, requests: int, kind: Kind) -> Sampling | None:
        """How the staged requests' drafts are drawn."""
        if kind == GREEDY:
            return None
        temperature = self.draft_temperature[:requests]
        if kind == SAMPLED:
            return Sampling(temperature)
        return Sampling(temperature, self.top_k[:requests], self.top_p[:requests])

    def gather(
        self,
        batch: Any,
        hidden: torch.Tensor,  # [tokens, hidden]
        num_sampled: torch.Tensor,  # [requests]
        num_rejected: torch.Tensor,  # [requests]
        last_sampled: torch.Tensor,  # [request rows, 1]
        kind: Kind,
        dummy: bool,
    ) -> None:
        """Stage a step that was verified: what drafts of a kind read."""
        n, speculator = batch.num_reqs, self.speculator
        self.clear()
        rows = batch.idx_mapping[:n]
        places = batch.query_start_loc[1 : n + 1].long() - 1 - num_rejected[:n]
        self.places[:n] = places
        torch.index_select(hidden, 0, places, out=self.hidden[:n])
        self.positions[:n] = batch.positions[places] + 1
        self.newest_ids[:n] = last_sampled[rows, 0]
        if dummy:  # its rows are nobody's
            self.temperature.fill_(1.0)
            self.draft_temperature.fill_(1.0)
            self.max_drafts.fill_(speculator.num_drafts)
            return
        # A chunk that does not end its prompt sampled nothing: it is padding, too.
        self.rows[:n] = torch.where(num_sampled[:n] > 0, rows, -1)
        requests: RequestOptions = speculator.requests
        states = speculator.runner.sampler.sampling_states
        self.max_drafts[:n] = self._most(requests.max_drafts.gpu[rows])
        if kind != GREEDY:
            self.temperature[:n] = states.temperature.gpu[rows]
            self.draft_temperature[:n] = self.temperature[:n].masked_fill(requests.greedy.gpu[rows], 0.0)
        if kind == TRUNCATED:
            self.top_k[:n] = states.top_k.gpu[rows]
            self.top_p[:n] = states.top_p.gpu[rows]
        if "eps_b" in speculator.config.spec.request_options:
            self.eps_b[:n] = requests.eps_b.gpu[rows]
        if self.context is not None:
            self._gather_context(rows, self.context[:n])

    def _most(self, most: torch.Tensor) -> torch.Tensor:
        """Drafts that each request may use, after the soft cut-off."""
        limit = self.speculator.config.max_drafting_requests
        return most if limit is None else torch.where((most > 0).cumsum(0) > limit, 0, most)

    def _gather_context(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """The latest tokens, newest first, -1 where there are none."""
        states = self.speculator.req_states
        at = states.total_len.gpu[rows].long()[:, None] - 1 - torch.arange(out.shape[1], device=out.device)
        tokens = states.all_token_ids.gpu[rows[:, None], at.clamp(min=0)].long()
        out.copy_(torch.where(at < 0, -1, tokens))

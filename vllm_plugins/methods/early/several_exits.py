# SPDX-License-Identifier: Apache-2.0
"""Early drafting with several exits: an unsure draft continues to the next exit (ParaDecode, eq. 1).

The host decides draft by draft which tokens continue, since that saves whole stacks: unlike the methods' drafters this
is no tensor program, and it runs on vLLM's runner V1 only.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.model_patches.base import CutState, ModelCut, rows_of
from vllm_ppd.vllm_plugins.drafting.planner import Plan
from vllm_ppd.vllm_plugins.engine.v1.batch import Step
from vllm_ppd.vllm_plugins.engine.v1.passes import Span, StackPasses, flat_ranges
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import DeferredKV
from vllm_ppd.vllm_plugins.methods.early.proposer import DeferredKVProposer
from vllm_ppd.vllm_plugins.methods.early.reader import EarlyReader, Reading


class SeveralExitsProposer(DeferredKVProposer):
    """Drafts at the first of several exits with enough confidence."""

    def load_model(self, model: Any) -> None:
        super().load_model(model)
        reader: EarlyReader = self.host.drafter.reader  # type: ignore[attr-defined]  # which reads any exit
        most = self.vllm_config.scheduler_config.max_num_batched_tokens
        self.loop = ShallowLoop(
            self.config.gamma, self.host.target.cut, self.passes, reader, self.deferred, most, self.runner.device
        )

    def make_drafts(self, plan: Plan, step: Step) -> tuple[np.ndarray, np.ndarray]:
        request_rows = self.request_rows[plan.rows]
        self.loop.gamma = self.gamma
        tokens, made = self.loop.run(plan, request_rows, self.draft_sampling(plan), self.q_rows)
        self.counters.add("confidence_stops", self.loop.confidence_stops)
        return tokens[:, 1:], self.host.valid(tokens[:, 1:], made)


class ShallowLoop:
    """Drafts for all requests of a plan at once, one token per turn.

    A request reads its draft at the first exit; if the confidence is not above gamma it continues to the next exit, and
    after the last one it stops drafting (ParaDecode, eq. 1). Nothing here loops over requests or tokens.
    """

    def __init__(
        self,
        gamma: float,
        cut: ModelCut,
        passes: StackPasses,
        reader: EarlyReader,
        deferred: DeferredKV,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self.gamma = gamma
        self.cut, self.passes, self.reader = cut, passes, reader
        self.saved, self.width = deferred.saved, deferred.width
        self.requests_a_pass = max(1, max_tokens // self.width)  # of deeper passes, with several tokens each
        self.device, self._index = device, partial(async_tensor_h2d, device=device)
        self.confidence_stops = 0  # of the last run

    def run(
        self, plan: Plan, request_rows: np.ndarray, sampling: Sampling | None, q_rows: torch.Tensor | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draft until every request has its drafts or has stopped.

        Args:
            plan: who drafts, from which base token, and at most how many tokens.
            request_rows: [requests] permanent rows.
            sampling: how drafts of each request are sampled; None to draft greedily.
            q_rows: [request rows, n, vocabulary] buffer that takes q(x) of sampled drafts, if any are.

        Returns:
            (tokens [requests, n+1]: base token and drafts, or INVALID; drafts made [requests]).
        """
        width, self.request_rows = self.width, request_rows
        self.level = np.zeros((len(plan.rows), width), dtype=np.int64)  # the stack to run next
        tokens = torch.zeros(len(plan.rows), width, dtype=torch.int64, device=self.device)
        tokens[:, 0] = self._index(plan.base_tokens)
        made = np.zeros(len(plan.rows), dtype=np.int64)
        active = np.arange(len(plan.rows))
        self.confidence_stops = 0
        for offset in range(width):
            rows, positions = plan.rows[active], plan.base_positions[active] + offset
            span = Span(rows, positions, np.ones(len(active), dtype=np.int64))
            state = self.passes.first(span, tokens[self._index(active), offset].clamp(min=0))  # INVALID is not an id
            self.saved.store(self._index(request_rows[active] * width + offset), state)
            self.level[active, offset] = 1
            drafting = plan.max_drafts[active] > offset
            if not drafting.any():
                break
            if not drafting.all():
                keep = self._index(np.flatnonzero(drafting))
                state = rows_of(state, keep)
                active = active[drafting]
            reading = self._read(0, active, state, sampling)
            if self.gamma > 0:
                reading, confident = self._deepen(reading, plan, active, offset, sampling)
                self.confidence_stops += int((~confident).sum())
                if not confident.any():
                    break
                if not confident.all():
                    reading = reading.rows(self._index(np.flatnonzero(confident)))
                    active = active[confident]
            tokens[self._index(active), offset + 1] = reading.token_ids
            if q_rows is not None and reading.probs is not None:
                q_rows[self._index(request_rows[active]), offset] = reading.probs
            made[active] = offset + 1
        self._complete(plan, made)
        return tokens.cpu().numpy(), made

    def _read(self, exit_index: int, requests: np.ndarray, state: CutState, sampling: Sampling | None) -> Reading:
        exit_layer = self.cut.exit_layers[exit_index]
        if sampling is None:
            return self.reader.greedy(exit_layer, state, with_confidence=self.gamma > 0)
        sampling = sampling.at(self._index(requests))
        return self.reader.sample(exit_layer, state, sampling).as_drawn(sampling)

    def _deepen(
        self, reading: Reading, plan: Plan, active: np.ndarray, offset: int, sampling: Sampling | None
    ) -> tuple[Reading, np.ndarray]:
        """Run the requests that are not confident to the next exits, one after the other, and read again.

        Returns:
            (the readings, which of them are confident [requests] bool).
        """
        confident = self._confident(reading)
        for level in range(1, len(self.cut.exit_layers)):
            if confident.all():
                break
            unsure = np.flatnonzero(~confident)
            requests = active[unsure]
            # Include earlier tokens that left at this exit: attention in the next layers needs their KV.
            self._advance(level, plan, requests, np.full(len(requests), offset + 1))
            state = self.saved.load(self._index(self.request_rows[requests] * self.width + offset))
            deeper = self._read(level, requests, state, sampling)
            reading = reading.replaced(self._index(unsure), deeper)
            confident = self._confident(reading)
        return reading, confident

    def _confident(self, reading: Reading) -> np.ndarray:
        assert reading.confidence is not None
        return (~(reading.confidence <= self.gamma)).cpu().numpy()  # NaN passes here and is dropped later as INVALID

    def _complete(self, plan: Plan, made: np.ndarray) -> None:
        """Run tokens that left at an earlier exit to the last one, so that the deep pass starts at one layer."""
        for level in range(1, len(self.cut.stacks) - 1):
            self._advance(level, plan, np.arange(len(plan.rows)), made + 1)

    def _advance(self, level: int, plan: Plan, requests: np.ndarray, counts: np.ndarray) -> None:
        """Run a middle stack on the tokens that still need it among the first `counts` tokens of some requests."""
        waiting = (self.level[requests] == level) & (np.arange(self.width) < counts[:, None])
        lengths = waiting.sum(axis=1)
        # Waiting tokens are always the tail: a request that goes deeper takes all of them along.
        first = counts - lengths
        some = np.flatnonzero(lengths)
        for start in range(0, len(some), self.requests_a_pass):
            chosen = some[start : start + self.requests_a_pass]
            which = requests[chosen]
            span = Span(plan.rows[which], plan.base_positions[which] + first[chosen], lengths[chosen])
            states = self._index(flat_ranges(self.request_rows[which] * self.width + first[chosen], lengths[chosen]))
            self.saved.store(states, self.passes.deeper(level, span, self.saved.load(states)))
            self.level.reshape(-1)[flat_ranges(which * self.width + first[chosen], lengths[chosen])] = level + 1

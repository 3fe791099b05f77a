# SPDX-License-Identifier: Apache-2.0
"""ParaDecode's Algorithm 1 over the tokens that an engine step may draft.

    one exit at l = L/2      layers 0..l      b    d1      d2      d3
                             layers l..L           b       d1      d2      d3
                                                   |       |       |
                             the final layer says  d1?     d2?     d3?    (no: drop what follows, start its own token)

Each column is one pass through l layers: the tokens in it share every batched product. Exits need not be the middle:
with an exit at L/4 four tokens are in flight. A token whose confidence is not above gamma at any exit is chosen by the
final layer, as without drafting. So every draft that vLLM is then given is the final layer's own token, and every token
has all of its KV and its final hidden state: the next step computes no layer at all, and vLLM's rejection sampler
verifies from those states with all that the request asked for (penalties, grammars, ...), of which nothing here knows.

Cost of n drafts, h of them predicted rightly at l: the launches of (n + 1 - h) L + h l layers for n + 1 tokens, and the
bytes of n + 1 passes. A step that is slow to end makes new requests wait for as long.
"""

from functools import partial

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.kernels.sampling import INVALID, Sampling, draw
from vllm_ppd.model_patches.base import Adapter
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.drafting.planner import Plan
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import DeferredKV
from vllm_ppd.vllm_plugins.methods.early.parallel_layers import ParallelLayers, TokenGroup
from vllm_ppd.vllm_plugins.methods.early.reader import EarlyReader, ExitState, Reading


class ParallelSchedule:
    """Drafts for the requests of a plan; each request predicts, is verified and restarts independently."""

    def __init__(
        self,
        config: DraftingConfig,
        adapter: Adapter,
        layers: ParallelLayers,
        reader: EarlyReader,
        deferred: DeferredKV,
        device: torch.device,
    ) -> None:
        assert config.exit_layer is not None
        self.exits, self.gamma, self.num_layers = config.exit_layer, config.gamma, config.num_layers
        self.adapter, self.layers, self.reader, self.device = adapter, layers, reader, device
        self._index = partial(async_tensor_h2d, device=device)
        self.saved, self.width = deferred.saved, deferred.width
        self.predictions = self.rejections = 0  # of the last run

    def run(
        self, plan: Plan, request_rows: np.ndarray, sampling: Sampling | None, q_rows: torch.Tensor | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draft every request's tokens and run them, and its base token, through all layers.

        Args:
            plan: who drafts, from which base token, and how many tokens.
            request_rows: [requests] permanent rows.
            sampling: how drafts of each request are sampled; None to draft greedily.
            q_rows: [request rows, n, vocabulary] buffer that takes q(x) of sampled drafts, if any are.

        Returns:
            (tokens [requests, n+1]: base token and drafts, or INVALID; drafts made [requests]).
        """
        requests = len(plan.rows)
        self.plan, self.request_rows, self.sampling, self.q_rows = plan, request_rows, sampling, q_rows
        self.tokens = torch.zeros(requests, self.width, dtype=torch.int64, device=self.device)
        self.tokens[:, 0] = self._index(plan.base_tokens)
        self.newest = np.zeros(requests, dtype=np.int64)  # offset of each request's last token in flight
        self.predictions = self.rejections = 0
        groups = [self._started(np.arange(requests), self.newest.copy())]  # in ascending order of their next layer
        while groups:
            self.layers.advance(groups, self._layers_to_next_stop(groups))
            groups = self._at_stop(groups)
        return self.tokens.cpu().numpy(), plan.max_drafts

    def _layers_to_next_stop(self, groups: list[TokenGroup]) -> int:
        """Layers until a group reaches an exit or the end, or a layer before which another group waits."""
        at = [group.layer for group in groups]
        stops = [min(stop for stop in (*self.exits, self.num_layers) if stop > layer) for layer in at]
        return min([stop - layer for stop, layer in zip(stops, at, strict=True)] + np.diff(at).tolist())

    def _at_stop(self, groups: list[TokenGroup]) -> list[TokenGroup]:
        """Read the groups that are at an exit or at the end; returns the groups then in flight."""
        ended = groups.pop() if groups[-1].layer == self.num_layers else None
        states: list[ExitState] = []
        asked: list[tuple[np.ndarray, np.ndarray]] = []  # (requests, offsets) of each state to read
        if ended is not None:
            unverified = self._end(ended)
            if unverified is not None:
                states.append((None, (unverified.hidden, None)))
                asked.append((unverified.requests, unverified.offsets))
        for group in groups:
            if group.layer in self.exits:
                # Only the newest token may predict, unless all drafts of the request are in flight.
                newest = self.newest[group.requests] == group.offsets
                which = np.flatnonzero(newest & (group.offsets < self.plan.max_drafts[group.requests]))
                if len(which):
                    index = self._index(which)
                    states.append((group.layer, (group.hidden[index], group.residual[index])))
                    asked.append((group.requests[which], group.offsets[which]))
        if not states:
            return groups
        reading = self._read(states, np.concatenate([requests for requests, _ in asked]))
        starts, first = [], 0
        rejected = np.zeros(len(self.newest), dtype=bool)
        for (layer, _), (requests, offsets) in zip(states, asked, strict=True):
            readings = reading.rows(torch.arange(first, first + len(requests), device=self.device))
            first += len(requests)
            if layer is None:
                chosen = self._verify(requests, offsets, readings)
                rejected[requests[chosen]] = True
            else:
                chosen = self._predict(requests, offsets, readings, ~rejected[requests])
            starts.append((requests[chosen], offsets[chosen] + 1))
        if rejected.any():
            groups = self._without(groups, rejected)
        begun, offsets = (np.concatenate(parts) for parts in zip(*starts, strict=True))
        if len(begun):
            self.newest[begun] = offsets
            groups.insert(0, self._started(begun, offsets))
        return groups

    def _end(self, group: TokenGroup) -> TokenGroup | None:
        """Keep the final hidden states of tokens that ran all layers; returns those that have a token to verify."""
        group.hidden = self.adapter.norm(group.hidden.contiguous(), group.residual.contiguous())
        rows = self.request_rows[group.requests]
        self.saved.store(self._index(rows * self.width + group.offsets), (group.hidden, None))
        more = group.offsets < self.plan.max_drafts[group.requests]
        return group.kept(more, self._index(np.flatnonzero(more))) if more.any() else None

    def _read(self, states: list[ExitState], requests: np.ndarray) -> Reading:
        if self.sampling is None:
            return self.reader.greedy_together(states, with_confidence=self.gamma > 0)
        sampling = self.sampling.at(self._index(requests))
        return self.reader.sample_together(states, sampling).as_drawn(sampling)

    def _verify(self, requests: np.ndarray, offsets: np.ndarray, final: Reading) -> np.ndarray:
        """Set the tokens behind some to the final layer's; returns those that are not in flight yet: [tokens] bool."""
        early = self.newest[requests] > offsets
        rows, columns = self._index(requests), self._index(offsets)
        predicted, chosen = self.tokens[rows, columns + 1], final.token_ids
        has_early = self._index(early) & (predicted != INVALID)
        same = has_early & (predicted == chosen)
        if self.q_rows is not None and final.probs is not None:
            # Sample from the final layer's distribution, coupled to keep the prediction as often as possible.
            request_rows, p = self._index(self.request_rows[requests]), final.probs
            q = torch.where(has_early[:, None], self.q_rows[request_rows, columns], 0.0)
            known = predicted.clamp(min=0)[:, None]
            ratio = (p.gather(1, known) / q.gather(1, known))[:, 0]
            same = has_early & (torch.rand_like(ratio) < ratio)
            drawn = torch.where(chosen == INVALID, INVALID, draw((p - q).clamp(min=0)))
            chosen = torch.where(same, predicted, drawn)
            self.q_rows[request_rows, columns] = p
        self.tokens[rows, columns + 1] = chosen
        kept = same.cpu().numpy()
        # Predictions after a rejected token are rejected, too.
        self.rejections += int((self.newest[requests] - offsets)[~kept].sum())
        return ~kept

    def _predict(self, requests: np.ndarray, offsets: np.ndarray, reading: Reading, alive: np.ndarray) -> np.ndarray:
        """Accept the predictions that an exit is sure of (ParaDecode, eq. 1): [tokens] bool."""
        sure = alive.copy()
        if self.gamma > 0:
            assert reading.confidence is not None
            sure &= (reading.confidence > self.gamma).cpu().numpy()
        which = self._index(np.flatnonzero(sure))
        rows, columns = self._index(requests[sure]), self._index(offsets[sure])
        self.tokens[rows, columns + 1] = reading.token_ids[which]
        if self.q_rows is not None and reading.probs is not None:
            self.q_rows[self._index(self.request_rows[requests[sure]]), columns] = reading.probs[which]
        self.predictions += int(sure.sum())
        return sure

    def _started(self, requests: np.ndarray, offsets: np.ndarray) -> TokenGroup:
        token_ids = self.tokens[self._index(requests), self._index(offsets)]
        hidden = self.adapter.embed(token_ids.clamp(min=0).to(torch.int32))  # INVALID is not an id
        positions = self.plan.base_positions[requests] + offsets
        return TokenGroup(requests, offsets, self.plan.rows[requests], positions, hidden, torch.zeros_like(hidden))

    def _without(self, groups: list[TokenGroup], rejected: np.ndarray) -> list[TokenGroup]:
        """The groups without the tokens that followed a rejected one."""
        left = []
        for group in groups:
            keep = ~rejected[group.requests]
            if keep.all():
                left.append(group)
            elif keep.any():
                left.append(group.kept(keep, self._index(np.flatnonzero(keep))))
        return left

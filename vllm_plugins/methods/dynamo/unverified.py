# SPDX-License-Identifier: Apache-2.0
"""DynaMo's own decoding (Algorithm 1): n-grams sampled from the joint and emitted unverified.

This is not the target's output. The next step computes an n-gram's tokens like a chunk of a prompt, so their KV
is the target's own. If the joint backs off to one token, that token is vLLM's own sample: with eps_b = 1 nothing
differs from ordinary sampling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_ppd.kernels.sampling import Sampling, distribution
from vllm_ppd.vllm_plugins.engine.requests import Setting

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.engine.v1.proposer import Proposer
    from vllm_ppd.vllm_plugins.methods.dynamo.drafter import DynaMoDrafter

PLACEHOLDER = -1  # vLLM's mark for no token


class NGramEmission:
    """Turns sampled tokens into n-grams, for the requests that allow them.

    A request that needs one token at a time (penalties, logprobs, a seed, ...) gets vLLM's own
    sample, and so does one that is about to reach its length limit.
    """

    def __init__(self, proposer: Proposer, drafter: DynaMoDrafter) -> None:
        self.proposer, self.drafter = proposer, drafter

    def emit(self, logits: torch.Tensor | None, sample: Callable[[], Any]) -> Any:
        """vLLM's SamplerOutput with n-grams in the rows that allow them: sampled_token_ids [rows, n]."""
        if logits is None:
            return sample()
        first_head = logits.float().clone()  # the sampler overwrites its input
        output = sample()
        # vLLM may give a new request with one token to compute places for drafts and several rows of logits.
        padded = output.sampled_token_ids.shape[1] > 1
        if padded or output.logprobs_tensors is not None:
            return output
        proposer = self.proposer
        emitted, request_rows = proposer.batch.emitting, proposer.request_rows
        most, _ = proposer.planner.allowed_drafts(emitted, request_rows)
        rows = np.flatnonzero(most)
        if not len(rows):
            return output
        n = self.drafter.drafts + 1
        tokens = torch.full((len(emitted), n), PLACEHOLDER, dtype=output.sampled_token_ids.dtype, device=logits.device)
        tokens[:, :1] = output.sampled_token_ids
        for part in self.drafter.parts(len(rows), n):
            chosen = rows[part]
            index = proposer.index(chosen)
            grams = self._sample(chosen, first_head[index])
            room = proposer.index(most[chosen] + 1)[:, None]
            grams = grams.masked_fill(torch.arange(n, device=grams.device) >= room, PLACEHOLDER)
            several = grams[:, 1] != PLACEHOLDER
            tokens[index[several]] = grams[several].to(tokens.dtype)
        proposer.counters.add("unverified_tokens", int((tokens[:, 1:] != PLACEHOLDER).sum()))
        return dataclasses.replace(output, sampled_token_ids=tokens)

    def _sample(self, rows: np.ndarray, first_logits: torch.Tensor) -> torch.Tensor:
        """Draw an n-gram for each row from the joint, at the request's temperature, top-k and top-p: [rows, n]."""
        proposer, drafter = self.proposer, self.drafter
        request_rows, options = proposer.request_rows[rows], proposer.host.options
        sampling = options.sampling(request_rows, Setting.TEMPERATURE)
        places = proposer.index(proposer.batch.starts[rows + 1].astype(np.int64) - 1)
        heads = [distribution(logits, sampling).log() for logits in (first_logits, *drafter.logits(places))]
        eps_b = proposer.index(options.settings[request_rows, Setting.EPS_B])
        context = proposer.context(rows) if drafter.context_tokens else None
        return drafter.choose(heads, None, eps_b, context).draw(Sampling(sampling.temperature))[0]

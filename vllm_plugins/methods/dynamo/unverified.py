# SPDX-License-Identifier: Apache-2.0
"""DynaMo's own decoding (Algorithm 1): n-grams sampled from the joint and emitted unverified.

This is not the target's output. The next step takes an n-gram's tokens in as it would a chunk of a prompt, so their KV
is the target's own. Where the joint backs off to one token, that token is vLLM's own sample: with eps_b = 1 nothing
differs from ordinary sampling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_ppd.kernels.sampling import divisor, is_greedy

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.methods.dynamo.proposer import DynaMoProposer

PLACEHOLDER = -1  # vLLM's mark of a place without a token


class NGramEmission:
    """Turns sampled tokens into n-grams, for the requests that can take them.

    A request that asks for something which needs one token at a time (penalties, logprobs, a seed, ...) gets vLLM's own
    sample; so does one that is about to reach its length.
    """

    def __init__(self, proposer: DynaMoProposer) -> None:
        self.proposer = proposer

    def emit(self, logits: torch.Tensor | None, sample: Callable[[], Any]) -> Any:
        """vLLM's SamplerOutput, with n-grams in the rows that take them: sampled_token_ids [rows, n]."""
        if logits is None:
            return sample()
        first_head = logits.float().clone()  # the sampler overwrites its input
        output = sample()
        # vLLM may give a request that comes in with one token to compute places for drafts, and several logits.
        padded = output.sampled_token_ids.shape[1] > 1
        if padded or output.logprobs_tensors is not None:
            return output
        runner, planner = self.proposer.runner, self.proposer.planner
        emitted = ~runner.discard_request_mask.np[: runner.input_batch.num_reqs]
        most, _ = planner.most_drafts(emitted, reserved=1)
        rows = np.flatnonzero(most * planner.several_at_once)
        if not len(rows):
            return output
        n = self.proposer.config.num_speculative_tokens + 1
        tokens = torch.full((len(emitted), n), PLACEHOLDER, dtype=output.sampled_token_ids.dtype, device=logits.device)
        tokens[:, :1] = output.sampled_token_ids
        for chosen in self.proposer.batches(rows, n):
            index = self.proposer.index(chosen)
            grams = self._sample(chosen, first_head[index], index)
            room = self.proposer.index(most[chosen] + 1)[:, None]
            grams = grams.masked_fill(torch.arange(n, device=grams.device) >= room, PLACEHOLDER)
            several = grams[:, 1] != PLACEHOLDER
            tokens[index[several]] = grams[several].to(tokens.dtype)
        self.proposer.counters.add("unverified_tokens", int((tokens[:, 1:] != PLACEHOLDER).sum()))
        return dataclasses.replace(output, sampled_token_ids=tokens)

    def _sample(self, rows: np.ndarray, first_logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """An n-gram of each row from the joint, at the request's temperature, top-k and top-p: [rows, n]."""
        proposer = self.proposer
        sampling = proposer.runner.input_batch.sampling_metadata
        temperature = torch.zeros(len(rows), device=index.device)
        if sampling.temperature is not None:
            temperature = sampling.temperature[index]
        places = proposer.runner.query_start_loc.gpu[index + 1] - 1
        logits = [first_logits, *proposer.logits(places)]
        scale = divisor(temperature)
        top_k = None if sampling.top_k is None else sampling.top_k[index]
        top_p = None if sampling.top_p is None else sampling.top_p[index]
        heads = [apply_top_k_top_p(head / scale, top_k, top_p) for head in logits]
        return proposer.choose(rows, heads, None).sample(greedy=is_greedy(temperature))

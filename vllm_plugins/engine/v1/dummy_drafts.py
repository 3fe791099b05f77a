# SPDX-License-Identifier: Apache-2.0
"""Drafting for dummy requests while vLLM measures memory: takes what drafting takes, and compiles every kernel.

Kernels are compiled for buckets of batch sizes (powers of two) and for each way of drawing drafts. Otherwise the first
drafted request would wait seconds for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.vllm_plugins.drafting.buckets import buckets
from vllm_ppd.vllm_plugins.drafting.drafter import DraftInputs

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.engine.v1.proposer import Proposer


def draft_for_dummies(proposer: Proposer) -> None:
    """Draft once for each bucket and way of drawing; leaves no state but the kernels behind.

    ParaDecode's parallel schedule has no drafter that runs by itself.
    """
    if not hasattr(proposer, "drafter"):
        return
    device = proposer.runner.device
    on_gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu), torch.inference_mode():  # samples must not depend on what was measured
        for requests in buckets(proposer.most_requests):
            for sampling in ways(proposer, requests):
                drafts = proposer.drafter.propose(_inputs(proposer, requests, sampling))
                if drafts.probs is not None:
                    proposer.keep_probs(np.arange(requests), drafts)


def ways(proposer: Proposer, requests: int) -> Iterator[Sampling | None]:
    """Greedy drafts; sampled ones; those that are cut to top-k and top-p."""
    yield None
    if proposer.probs is not None:
        device = proposer.runner.device
        ones = torch.ones(requests, device=device)
        yield Sampling(ones)
        most = torch.full((requests,), proposer.target.vocab_size, dtype=torch.int32, device=device)
        yield Sampling(ones, most, ones)


def _inputs(proposer: Proposer, requests: int, sampling: Sampling | None) -> DraftInputs:
    target, drafter, config = proposer.target, proposer.drafter, proposer.config
    zeros = torch.zeros(requests, dtype=torch.int64, device=target.device)
    unset = torch.full((requests,), torch.nan, device=target.device)
    context = None
    if drafter.context_tokens:
        context = zeros[:, None].expand(-1, drafter.context_tokens)
    return DraftInputs(
        newest_ids=zeros,
        hidden=torch.zeros(requests, target.hidden_size, dtype=target.dtype, device=target.device),
        places=zeros,
        max_drafts=zeros + config.num_speculative_tokens,
        num_drafts=config.num_speculative_tokens,
        sampling=sampling,
        shallow=proposer.dummy_shallow,
        options=dict.fromkeys(config.spec.request_options, unset),
        context=context,
    )

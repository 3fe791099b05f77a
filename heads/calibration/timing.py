# SPDX-License-Identifier: Apache-2.0
"""Seconds a decoder layer and an LM head by batch size: what a draft costs beside a full pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from vllm_ppd.heads.measured import Timed
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

REPEATS = 20


@torch.no_grad()
def time_layers(target: Target, batch_sizes: tuple[int, ...], autocast: Any) -> Timed:
    """Median seconds of one decoder layer and of one read of the LM head, for one token a request.

    transformers' eager modules, without KV history: good for ratios, while a server has its own times.
    """
    layers, lm_heads = {}, {}
    for size in batch_sizes:
        ids = torch.zeros(size, 1, dtype=torch.int64, device=target.device)
        with autocast():
            call = target.run(Batch(ids, torch.zeros_like(ids)), stem=True).stem
            assert call is not None
            args, kwargs = call
            hidden = target.run(Batch(ids, torch.zeros_like(ids))).final.to(target.unembedding.dtype)
            layer = partial(target.layers[-1], *args, **kwargs)
            layers[size] = _median(layer, target.device)
            head = partial(functional.linear, hidden, target.unembedding, target.bias)
            lm_heads[size] = _median(head, target.device)
    return Timed(layer=layers, lm_head=lm_heads)


def _median(call: Callable[[], Any], device: torch.device) -> float:
    seconds = []
    for _ in range(REPEATS + 3):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[3:])

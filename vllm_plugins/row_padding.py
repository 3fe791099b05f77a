# SPDX-License-Identifier: Apache-2.0
"""Passes of a few tokens, run with as many rows as the machine's products are fastest at.

A CPU's product of two rows may take longer than that of four: its kernels are made for blocks of rows. On an EPYC with
AVX-512 BF16 the products of a 300M model's layers take 19.7 ms of one row, 23.0 of two, 16.8 of three and 16.0 of four
to six. The one request that verifies one draft is where that hurts most. So a pass whose tokens are few runs with rows
of padding, as in vLLM's CUDA graphs: they have no KV slot, and nobody reads what they come to.

Steps without drafts stay as vLLM runs them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.platforms import current_platform

logger = logging.getLogger("vllm.vllm_ppd")

MOST_ROWS = 8  # of a pass; products of more rows cost more wherever they were measured
LEAST_GAIN = 0.04  # of the products' seconds, for padding to be worth it
WEIGHTS = 2**26  # of the products that are timed: more bytes than a core's caches hold
ROUNDS = 7


class RowPadding:
    """How many rows a pass of so many tokens has.

    Args:
        seconds: [rows, from 1] that the target's products take; nothing is padded beyond so many rows.
    """

    def __init__(self, seconds: np.ndarray) -> None:
        self.table = list(range(1, 1 + len(seconds)))
        for tokens in range(1, 1 + len(seconds)):
            of_more = seconds[tokens - 1 :]
            if of_more.min() < (1 - LEAST_GAIN) * of_more[0]:
                # The fewest rows that are about as fast as the fastest.
                self.table[tokens - 1] = tokens + int(np.argmax(of_more < (1 + LEAST_GAIN / 2) * of_more.min()))

    def rows(self, tokens: int) -> int:
        return self.table[tokens - 1] if 0 < tokens <= len(self.table) else tokens


NONE = RowPadding(np.empty(0))


def measured(model: Any, vllm_config: Any, agree: Callable[[np.ndarray], np.ndarray] | None) -> RowPadding:
    """The padding that suits this machine's products of the target's own linear layers.

    Args:
        model: loaded, its weights as the forward pass reads them.
        agree: makes the first tensor-parallel rank's numbers those of all.

    Returns:
        NONE on GPUs, whose graphs are padded by vLLM, and on pipeline stages, which must all have the same rows.
    """
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    most = min(MOST_ROWS, scheduler.max_num_batched_tokens)
    if not current_platform.is_cpu() or parallel.pipeline_parallel_size > 1:
        return NONE
    seconds = _seconds(_layers(model), vllm_config.model_config.dtype, most)
    padding = RowPadding(seconds if agree is None else agree(seconds))
    padded = [f"{tokens} as {rows}" for tokens, rows in enumerate(padding.table, 1) if rows > tokens]
    if padded:
        logger.info("vllm-ppd: products of more rows are faster here: passes of few tokens run padded (%s)",
                    ", ".join(padded))  # fmt: skip
    return padding


def _layers(model: Any) -> list[ColumnParallelLinear | RowParallelLinear]:
    """The first linear layers of a model, up to so many weights."""
    found, weights = [], 0
    for layer in model.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and weights < WEIGHTS:
            found.append(layer)
            weights += layer.input_size_per_partition * layer.output_size_per_partition
    return found


@torch.inference_mode()
def _seconds(layers: list[ColumnParallelLinear | RowParallelLinear], dtype: torch.dtype, most: int) -> np.ndarray:
    """[rows, from 1] of these layers' products, the fastest of some rounds."""
    inputs = [torch.zeros(most, layer.input_size_per_partition, dtype=dtype) for layer in layers]
    seconds = np.zeros((ROUNDS + 1, most))
    for of_round in seconds:
        for rows in range(1, most + 1):
            started = time.perf_counter()
            for layer, states in zip(layers, inputs, strict=True):
                assert layer.quant_method is not None
                layer.quant_method.apply(layer, states[:rows])
            of_round[rows - 1] = time.perf_counter() - started
    return seconds[1:].min(axis=0)  # the first round makes the kernels

# SPDX-License-Identifier: Apache-2.0
"""Passes of a few tokens, run with as many rows as the machine's products are fastest at.

A CPU's product of two rows may take longer than that of four: its kernels are made for blocks of rows. On an EPYC with
AVX-512 BF16 the products of a 300M model's layers take 19.7 ms of one row, 23.0 of two, 16.8 of three and 16.0 of four
to six. The one request that verifies one draft is where that hurts most. So a pass whose tokens are few runs with rows
of padding, as in vLLM's CUDA graphs: they have no KV slot, and nobody reads what they come to. Only so many as leave
every bit of the tokens' own rows what it is: on that machine two rows and more are alike, and one is not.

Steps without drafts stay as vLLM runs them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

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
        seconds: [tokens, rows], both from 1, that the target's products take; inf where padding to so many rows would
            change a bit of what they come to, or there are fewer rows than tokens. More tokens are not padded.
    """

    def __init__(self, seconds: np.ndarray) -> None:
        self.table = list(range(1, 1 + len(seconds)))
        for tokens, of_rows in enumerate(seconds, 1):
            if of_rows.min() < (1 - LEAST_GAIN) * of_rows[tokens - 1]:
                # The fewest rows that are about as fast as the fastest.
                self.table[tokens - 1] = 1 + int(np.argmax(of_rows < (1 + LEAST_GAIN / 2) * of_rows.min()))

    def rows(self, tokens: int) -> int:
        return self.table[tokens - 1] if 0 < tokens <= len(self.table) else tokens


NONE = RowPadding(np.empty((0, 0)))


def measured(model: Any, vllm_config: Any, agree: Callable[[np.ndarray], np.ndarray] | None) -> RowPadding:
    """The padding that suits this machine's products of the target's own linear layers.

    Args:
        model: loaded, its weights as the forward pass reads them.
        agree: makes the first tensor-parallel rank's numbers those of all.

    Returns:
        NONE on GPUs, whose graphs are padded by vLLM, on pipeline stages, which must all have the same rows, of
        mixtures of experts, where each row of padding may read experts of its own, and with LoRA, whose CPU products
        know the adapter of the tokens alone.
    """
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    fits = parallel.pipeline_parallel_size == 1 and not vllm_config.model_config.is_moe
    if not current_platform.is_cpu() or not fits or vllm_config.lora_config is not None:
        return NONE
    products = _products(model, vllm_config.model_config.dtype, min(MOST_ROWS, scheduler.max_num_batched_tokens))
    if not products:  # vLLM's Transformers backend may have other layers alone
        return NONE
    seconds = np.where(_alike(products), _seconds(products), np.inf)
    padding = RowPadding(seconds if agree is None else agree(seconds))
    padded = [f"{tokens} as {rows}" for tokens, rows in enumerate(padding.table, 1) if rows > tokens]
    if padded:
        logger.info("vllm-ppd: products of more rows are faster here: passes of few tokens run padded (%s)",
                    ", ".join(padded))  # fmt: skip
    return padding


class _Product(NamedTuple):
    layer: ColumnParallelLinear | RowParallelLinear
    states: torch.Tensor  # [rows, in]

    def of(self, rows: int) -> torch.Tensor:
        """Of the first rows: [rows, out]."""
        assert self.layer.quant_method is not None
        return self.layer.quant_method.apply(self.layer, self.states[:rows])


def _products(model: Any, dtype: torch.dtype, rows: int) -> list[_Product]:
    """The first linear layers of a model, up to so many weights, with something for each to read."""
    found, weights, generator = [], 0, torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and weights < WEIGHTS:
            states = torch.randn(rows, layer.input_size_per_partition, generator=generator)
            found.append(_Product(layer, states.to(dtype)))
            weights += layer.input_size_per_partition * layer.output_size_per_partition
    return found


@torch.inference_mode()
def _alike(products: list[_Product]) -> np.ndarray:
    """[tokens, rows], both from 1: whether a product of more rows is bit for bit that of the tokens alone."""
    most = len(products[0].states)
    alike = np.triu(np.ones((most, most), dtype=bool))
    for product in products:
        of = [product.of(rows) for rows in range(1, most + 1)]
        for tokens, rows in np.argwhere(alike) + 1:
            alike[tokens - 1, rows - 1] = torch.equal(of[rows - 1][:tokens], of[tokens - 1])
    return alike


@torch.inference_mode()
def _seconds(products: list[_Product]) -> np.ndarray:
    """[rows, from 1] of these products, the fastest of some rounds."""
    seconds = np.zeros((ROUNDS, len(products[0].states)))
    for of_round in seconds:
        for rows in range(1, len(of_round) + 1):
            started = time.perf_counter()
            for product in products:
                product.of(rows)
            of_round[rows - 1] = time.perf_counter() - started
    return seconds.min(axis=0)

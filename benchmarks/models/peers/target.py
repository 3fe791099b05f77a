# SPDX-License-Identifier: Apache-2.0
"""What peers are trained on: a frozen target, and the demo's corpus or the data that our heads were trained on."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vllm_ppd.benchmarks.models.corpus import split
from vllm_ppd.benchmarks.models.training import spaced, window
from vllm_ppd.heads.training.order import Order
from vllm_ppd.heads.training.recipe import drawn
from vllm_ppd.heads.training.states import Reads, StatesCache, read_target
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch, TokenStore

WINDOW = 512  # tokens, of the corpus
HELD_OUT = 32  # windows


class Source(ABC):
    """Windows of tokens to train on, and the target's states of them."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.cache: StatesCache | None = None

    @abstractmethod
    def training(self, step: int) -> Batch:
        """The windows of a step."""

    @abstractmethod
    def held_out(self) -> Batch:
        """Evenly spaced windows that are not trained on."""

    @torch.no_grad()
    def states(self, batch: Batch) -> torch.Tensor:
        """After the final norm, which is what vLLM hands to a drafter: [windows, length, hidden]."""
        return read_target(self.target, batch, Reads(), self.cache).final.view(*batch.input_ids.shape, -1)


class Corpus(Source):
    """The demo's corpus: the first documents of a shuffle that have as many tokens as a training needs."""

    def __init__(self, target: Target, steps: int, count: int, seed: int) -> None:
        super().__init__(target)
        self.count, self.seed = count, seed
        training, validation = split()
        random.Random(seed).shuffle(training)
        self._training = self._encode(training, steps * count * WINDOW)
        self._validation = self._encode(validation, 4 * HELD_OUT * WINDOW)

    def training(self, step: int) -> Batch:
        return self._batch(window(self._training, step, self.count, WINDOW, self.seed))

    def held_out(self) -> Batch:
        return self._batch(spaced(self._validation, HELD_OUT, WINDOW))

    @staticmethod
    def _batch(ids: torch.Tensor) -> Batch:
        return Batch(ids, torch.arange(ids.shape[1]).expand(ids.shape))

    def _encode(self, texts: list[str], wanted: int) -> torch.Tensor:
        tokenizer = self.target.tokenizer
        ids: list[int] = []
        for text in texts:
            ids += [*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id]
            if len(ids) >= max(wanted, 2 * WINDOW):
                break
        return torch.tensor(ids)


class Given(Source):
    """Files as `ppd train` reads them, in its windows and order, with its cache of states where there is one."""

    def __init__(
        self, target: Target, files: Sequence[Path], folder: Path, cache: Path | None, count: int, seed: int
    ) -> None:
        super().__init__(target)
        self.store = TokenStore(folder, files, target.tokenizer, target.vocab_size, 0.02, 1024)
        self.order = Order(self.store, seed, count, one_grid=True)
        self.steps = self.store.num_windows() // count
        if cache is not None:
            self.cache = StatesCache(cache, target, self.store, Reads(), 20_000_000_000)

    def training(self, step: int) -> Batch:
        return next(self.order.batches(step, 1))

    def held_out(self) -> Batch:
        windows = self.store.num_windows("held_out")
        return self.store.batch("held_out", [i * windows // HELD_OUT for i in range(min(HELD_OUT, windows))])


class Peer(ABC, nn.Module):
    """What is trained beside a target.

    Args:
        target: frozen.
        share: of a window's positions, those whose loss over the vocabulary is computed.
    """

    learning_rate = 1e-3
    by_muon = True  # its matrices

    def __init__(self, target: Target, share: float = 1.0) -> None:
        super().__init__()
        self.outside, self.share = (target,), share  # no module of this one

    @property
    def target(self) -> Target:
        return self.outside[0]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The target's [..., V] of states [..., hidden]."""
        unembedding = self.target.unembedding
        return functional.linear(states.to(unembedding.dtype), unembedding)

    def chosen(self, known: torch.Tensor) -> torch.Tensor:
        """Of the known positions [rows, tokens] bool a share, all of them in evaluation: [chosen] of the flat ones."""
        return drawn(known.flatten(), self.share if self.training else 1.0)

    @property
    def matrices(self) -> list[nn.Parameter]:
        """What Muon trains."""
        return [p for p in self.parameters() if p.dim() == 2] if self.by_muon else []

    @abstractmethod
    def loss(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """Of windows and the target's states of them [windows, length, hidden]."""

    @abstractmethod
    def held_out(self, batch: Batch, hidden: torch.Tensor) -> dict[str, float]:
        """How often it is right on windows, by what."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Its config.json, as vLLM reads it."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Its weights, as vLLM names them."""

# SPDX-License-Identifier: Apache-2.0
"""What peers are trained on: the frozen demo model, and the corpus that our heads were trained on."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_ppd.benchmarks.models.corpus import split
from vllm_ppd.benchmarks.models.training import spaced

WINDOW = 512  # tokens
HELD_OUT = 32  # windows


class Target:
    """The frozen target, with as much of the corpus in its tokens as a training needs."""

    def __init__(self, model: Path, training_tokens: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).requires_grad_(False).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.config = self.model.config
        self.unembedding: torch.Tensor = self.model.get_output_embeddings().weight
        training, validation = split()
        random.Random(seed).shuffle(training)
        self.training = self._encode(training, training_tokens)
        self.validation = self._encode(validation, 4 * HELD_OUT * WINDOW)

    def _encode(self, texts: list[str], wanted: int) -> torch.Tensor:
        """The first documents that have so many tokens together."""
        ids: list[int] = []
        for text in texts:
            ids += [*self.tokenizer(text, verbose=False)["input_ids"], self.tokenizer.eos_token_id]
            if len(ids) >= max(wanted, 2 * WINDOW):
                break
        return torch.tensor(ids)

    @torch.no_grad()
    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """States after the final norm, which is what vLLM hands to a drafter: [rows, tokens, d]."""
        states: torch.Tensor = self.model.model(input_ids=ids).last_hidden_state
        return states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., V] of states [..., d]."""
        return functional.linear(states, self.unembedding)

    def held_out(self) -> torch.Tensor:
        """Evenly spaced windows of held-out tokens: [HELD_OUT, WINDOW]."""
        return spaced(self.validation, HELD_OUT, WINDOW)


class Peer(ABC, nn.Module):
    """What is trained beside a target."""

    learning_rate = 1e-3
    by_muon = True  # its matrices

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = (target,)  # no module of this one

    @property
    def matrices(self) -> list[nn.Parameter]:
        """What Muon trains."""
        return [p for p in self.parameters() if p.dim() == 2] if self.by_muon else []

    @abstractmethod
    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Of windows [rows, tokens]."""

    @abstractmethod
    def held_out(self, ids: torch.Tensor) -> dict[str, float]:
        """How often it is right on windows [rows, tokens], by what."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Its config.json, as vLLM reads it."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Its weights, as vLLM names them."""

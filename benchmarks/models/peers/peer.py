# SPDX-License-Identifier: Apache-2.0
"""What all peers share: their options, the target's states that they read, and the folder that vLLM reads."""

from __future__ import annotations

import json
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch.nn import functional

from vllm_ppd.benchmarks.models.model_recipe import ModelOptions, ModelRecipe
from vllm_ppd.heads.files import write_tensors, write_text
from vllm_ppd.heads.training.tokens import Batch


class PeerOptions(ModelOptions):
    """How a peer is trained."""

    batch_size: int = Field(8, ge=1, description="windows a step")
    sequence_length: int = Field(512, ge=8, description="tokens of a window")
    position_share: float = Field(1.0, gt=0, le=1, description="share of positions in losses over the vocabulary")


class Peer(ModelRecipe):
    """What is trained beside a frozen target."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Its config.json, as vLLM reads it."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Its weights, as vLLM names them."""

    def final_states(self, batch: Batch) -> torch.Tensor:
        """After the final norm, which is what vLLM hands to a drafter: [windows, length, hidden]."""
        with torch.no_grad():
            return self.states(batch).final.float().view(*batch.input_ids.shape, -1)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The target's [..., V] of states [..., hidden]."""
        unembedding = self.target.unembedding
        return functional.linear(states.to(unembedding.dtype), unembedding).float()

    def summary(self, counts: dict[str, float]) -> dict[str, Any]:
        return {"the target's token": round(counts["right"] / counts["known"], 4)}

    def write(self, out: Path, provenance: str) -> None:
        stored = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in self.tensors().items()}
        write_tensors(out / "model.safetensors", stored, {"format": "pt"})
        write_text(out / "config.json", json.dumps(self.config() | {"torch_dtype": "bfloat16"}, indent=2) + "\n")
        write_text(out / "provenance.json", provenance)

# SPDX-License-Identifier: Apache-2.0
"""An EAGLE head for comparison, as a recipe of our training loop.

`python -m vllm_ppd.benchmarks.models eagle --model M --data train.jsonl --out DIR`
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
)

from vllm_ppd.heads.files import write_json, write_tensors
from vllm_ppd.heads.options import TrainingOptions
from vllm_ppd.heads.training.loop import train
from vllm_ppd.heads.training.recipe import Counts, Recipe
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch


class EagleOptions(TrainingOptions):
    """Training options of an EAGLE head: Muon for matrices, AdamW for the rest."""

    kind: ClassVar[str] = "eagle"

    learning_rate: float = Field(
        7e-3, gt=0, description="peak learning rate of Muon: the layer's matrices"
    )
    others_rate: float = Field(
        1e-3, gt=0, description="peak learning rate of AdamW: vectors"
    )
    weight_decay: float = Field(
        0.1, ge=0, description="decoupled weight decay of the matrices"
    )
    batch_size: int = Field(8, ge=1, description="windows per step")
    sequence_length: int = Field(512, ge=8, description="tokens of a window")


class Eagle(Recipe):
    """An EAGLE head (Li et al., 2024): a decoder layer over fc([embedding of token t+1,
    state that gave it]).

    It predicts the state that gives token t+2; embedding and LM head are the target's.
    Loss: smooth L1 of the states, and a tenth of the cross-entropy to the target's
    distribution; uniform noise on the states, as in the paper.
    """

    NOISE = 0.1  # uniform noise from [-NOISE, NOISE] is added to states
    CLASSIFICATION = 0.1  # weight of the cross-entropy

    def __init__(self, options: EagleOptions, target: Target) -> None:
        super().__init__(options, target)
        config: Any = target.config
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        # Start from the state as it is: what follows need only say how the next one
        # differs.
        self.fc.weight.data = torch.cat(
            [0.02 * torch.randn(size, size), torch.eye(size)], dim=1
        )
        layer: Any = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = nn.Identity()  # vLLM's head has none
        self.layer = layer
        self.rotary: Any = LlamaRotaryEmbedding(config)
        self.to(target.device)

    def groups(self, learning_rate: float) -> list[dict[str, Any]]:
        vectors = {
            "params": [p for p in self.parameters() if p.dim() == 1],
            "peak": self.options.others_rate,
            "muon": False,
            "weight_decay": 0.0,
        }
        matrices = [p for p in self.parameters() if p.dim() == 2]
        return [{"params": matrices, "peak": learning_rate}, vectors]

    def logits(self, states: Tensor) -> Tensor:
        """The target's logits [..., V] for states [..., hidden]."""
        unembedding = self.target.unembedding
        return functional.linear(
            states.to(unembedding.dtype), unembedding
        ).float()

    def predicted(self, batch: Batch, hidden: Tensor) -> Tensor:
        """The predicted state after each token but a window's last: [windows, length -
        1, hidden].

        Args:
            batch: of windows, in which documents begin at position 0.
            hidden: [windows, length, hidden], the target's final states.
        """
        positions = batch.position_ids[:, :-1]
        states = hidden[:, :-1]
        if self.training:
            states = states + self.NOISE * (2 * torch.rand_like(states) - 1)
        embedded = self.target.embed(batch.input_ids[:, 1:]).float()
        x = self.fc(torch.cat([embedded, states], dim=-1))
        # Documents, which begin at position 0, do not see each other.
        mask = create_causal_mask(self.target.config, x, None, None, positions)
        rotary = self.rotary(x, positions)
        return self.layer(
            x,
            attention_mask=mask,
            position_embeddings=rotary,
            position_ids=positions,
        )

    def loss(self, batch: Batch) -> tuple[Tensor, Counts]:
        # After the final norm, as vLLM gives states to drafters
        final = self.states(batch).final.float()
        hidden = final.view(*batch.input_ids.shape, -1)
        predicted = self.predicted(batch, hidden).flatten(0, 1)
        wanted = hidden[:, 1:].flatten(0, 1)
        known = batch.ahead(1)[1].view(batch.input_ids.shape)[:, :-1].flatten()
        regression = functional.smooth_l1_loss(
            predicted[known].float(), wanted[known]
        )
        rows = self.share_of(known)
        logits = self.logits(predicted[rows])
        teacher = self.logits(wanted[rows])
        # Cross-entropy to the target's distribution, and how often the best tokens
        # agree.
        classification = functional.cross_entropy(logits, teacher.softmax(-1))
        right = (teacher.argmax(-1) == logits.argmax(-1)).sum()
        counts = {"right": right, "known": torch.tensor(len(logits))}
        return regression + self.CLASSIFICATION * classification, counts

    def summary(self, counts: dict[str, float]) -> dict[str, Any]:
        return {"the target's token": round(counts["right"] / counts["known"], 4)}

    def write(self, out: Path, provenance: dict[str, Any]) -> None:
        tensors = {"fc.weight": self.fc.weight.detach()}
        for name, tensor in self.layer.state_dict().items():
            tensors[f"layers.0.{name}"] = tensor
        stored = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        write_tensors(out / "model.safetensors", stored)
        changes = {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "torch_dtype": "bfloat16",
        }
        write_json(out / "config.json", self.target.config.to_dict() | changes)
        write_json(out / "provenance.json", provenance)


def run(options: EagleOptions) -> int:
    """Train a head and write its folder."""
    facts = train(options, Eagle)
    print(
        f"wrote {Path(options.out)}: {facts['tokens']:,} tokens; held out: "
        f"{facts['held_out_after']}"
    )
    return 0

# SPDX-License-Identifier: Apache-2.0
"""An EAGLE head for comparison, as a recipe of our training loop.

`python -m vllm_ppd.benchmarks.models eagle --model M --data train.jsonl --out DIR`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from vllm_ppd.heads.data.check import check_data
from vllm_ppd.heads.files import write_tensors, write_text
from vllm_ppd.heads.training.loop import train
from vllm_ppd.heads.training.options import TrainingOptions
from vllm_ppd.heads.training.recipe import Counts, Recipe, accepted_counts
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch
from vllm_ppd.kernels.unembedding_loss import top_log_probs


class ModelOptions(TrainingOptions):
    """Training options of a small model: Muon for matrices, AdamW for the rest."""

    optimizer: Literal["adamw", "muon"] = "muon"  # which needs a quarter of AdamW's tokens at this size
    learning_rate: float = Field(7e-3, gt=0, description="peak learning rate of Muon: the layers' matrices")
    others_rate: float = Field(1e-3, gt=0, description="peak learning rate of AdamW: embeddings and vectors")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay of the matrices")


class ModelRecipe(Recipe):
    """A recipe for a small model."""

    def matrices(self) -> list[nn.Parameter]:
        """The parameters for Muon."""
        return [p for p in self.parameters() if p.dim() == 2]

    def groups(self, learning_rate: float) -> list[dict[str, Any]]:
        matrices = self.matrices()
        others = [p for p in self.parameters() if all(p is not matrix for matrix in matrices)]
        return [
            {"params": matrices, "peak": learning_rate},
            {"params": others, "peak": self.options.others_rate, "muon": False, "weight_decay": 0.0},
        ]


class EagleOptions(ModelOptions):
    """Training options of an EAGLE head."""

    kind: ClassVar[str] = "eagle"

    batch_size: int = Field(8, ge=1, description="windows per step")
    sequence_length: int = Field(512, ge=8, description="tokens of a window")
    position_share: float = Field(1.0, gt=0, le=1, description="share of positions in losses over the vocabulary")


class Eagle(ModelRecipe):
    """An EAGLE head (Li et al., 2024): a decoder layer over fc([embedding of token t+1, state that gave it]).

    It predicts the state that gives token t+2; embedding and LM head are the target's. Loss: smooth L1 of the states,
    and a tenth of the cross-entropy to the target's distribution; uniform noise on the states, as in the paper.
    """

    DRAFTS = 3  # of a step, counted on held-out text
    NOISE = 0.1  # uniform noise from [-NOISE, NOISE] is added to states
    CLASSIFICATION = 0.1  # weight of the cross-entropy

    def __init__(self, options: EagleOptions, target: Target) -> None:
        super().__init__(options, target)
        config: Any = target.config
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        # Start from the state as it is: what follows need only say how the next one differs.
        self.fc.weight.data = torch.cat([0.02 * torch.randn(size, size), torch.eye(size)], dim=1)
        layer: Any = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = nn.Identity()  # vLLM's head has none
        self.layer = layer
        self.rotary: Any = LlamaRotaryEmbedding(config)
        self.to(target.device)

    def final_states(self, batch: Batch) -> torch.Tensor:
        """The target's states after the final norm, which vLLM gives to drafters: [windows, length, hidden]."""
        with torch.no_grad():
            return self.states(batch).final.float().view(*batch.input_ids.shape, -1)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The target's logits [..., V] for states [..., hidden]."""
        unembedding = self.target.unembedding
        return functional.linear(states.to(unembedding.dtype), unembedding).float()

    def likeliest(self, states: torch.Tensor) -> torch.Tensor:
        """The target's greedy tokens [...] for states [..., hidden]."""
        ids, _ = top_log_probs(states.flatten(0, -2), 1, self.target.unembedding, self.target.bias)
        return ids.view(states.shape[:-1])

    def accepted(self, batch: Batch, final: torch.Tensor, drafted: torch.Tensor) -> Counts:
        """How many drafts in a row are the target's greedy tokens, given the text's tokens before them.

        Args:
            batch: held out.
            final: its final_states.
            drafted: [windows * length, drafts] after each token and its successor, which the target has sampled.
        """
        drafts = drafted.shape[1]
        rows = batch.ahead(drafts + 1)[1].nonzero()
        if not len(rows):
            return {}
        wanted = self.likeliest(final).flatten()
        return accepted_counts(drafted[rows[:, 0]] == wanted[rows + torch.arange(1, drafts + 1, device=rows.device)])

    def predicted(self, batch: Batch, hidden: torch.Tensor, drafts: int = 1) -> list[torch.Tensor]:
        """The predicted states of each draft, for every token as a start except a window's last ones.

        A later draft reads the state that the one before it predicted, and the text's token; it attends to the target's
        states up to its start and to the drafts after it.

        Returns:
            [windows, length - drafts, d] of each draft.
        """
        starts = batch.input_ids.shape[1] - drafts
        positions, states = batch.position_ids[:, :starts], hidden[:, :starts]
        noise = self.NOISE if self.training else 0.0
        states = states + noise * (2 * torch.rand_like(states) - 1)
        document, itself = (positions == 0).cumsum(1), torch.eye(starts, dtype=torch.bool, device=states.device)
        seen = torch.ones_like(itself).tril() & (document[:, :, None] == document[:, None])
        inputs, outputs = [], list[torch.Tensor]()
        for draft in range(1, drafts + 1):
            embedded = self.target.embed(batch.input_ids[:, draft : draft + starts]).float()
            inputs.append(self.fc(torch.cat([embedded, states], dim=-1)))
            x, at = torch.cat(inputs, dim=1), torch.cat([positions + i for i in range(draft)], dim=1)
            # Only the last draft's output is read, and a single layer reads no other's.
            mask = torch.cat([seen, *[itself.expand_as(seen)] * (draft - 1)], dim=2).repeat(1, draft, 1)[:, None]
            output = self.layer(x, attention_mask=mask, position_embeddings=self.rotary(x, at), position_ids=at)
            states = (output[0] if isinstance(output, tuple) else output)[:, -starts:]
            outputs.append(states)
        return outputs

    def loss(self, batch: Batch) -> tuple[torch.Tensor, Counts]:
        hidden = self.final_states(batch)
        predicted, wanted = (states.flatten(0, 1) for states in (*self.predicted(batch, hidden), hidden[:, 1:]))
        known = batch.ahead(1)[1].view(batch.input_ids.shape)[:, :-1].flatten()
        regression = functional.smooth_l1_loss(predicted[known].float(), wanted[known])
        rows = self.share_of(known, self.options.position_share)
        logits, teacher = self.logits(predicted[rows]), self.logits(wanted[rows])
        # Cross-entropy to the target's distribution, and how often the best tokens agree.
        classification = functional.cross_entropy(logits, teacher.softmax(-1))
        right = (teacher.argmax(-1) == logits.argmax(-1)).sum()
        counts = {"right": right, "known": torch.tensor(len(logits))}
        if not self.training:
            drafted = torch.stack([self.likeliest(states) for states in self.predicted(batch, hidden, self.DRAFTS)], -1)
            counts |= self.accepted(batch, hidden, functional.pad(drafted, (0, 0, 0, self.DRAFTS)).flatten(0, 1))
        return regression + self.CLASSIFICATION * classification, counts

    def summary(self, counts: dict[str, float]) -> dict[str, Any]:
        return {"the target's token": round(counts["right"] / counts["known"], 4)}

    def config(self) -> dict[str, Any]:
        return self.target.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}

    def tensors(self) -> dict[str, torch.Tensor]:
        layer = {f"layers.0.{name}": tensor for name, tensor in self.layer.state_dict().items()}
        return {"fc.weight": self.fc.weight, **layer}

    def write(self, out: Path, provenance: str) -> None:
        stored = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in self.tensors().items()}
        write_tensors(out / "model.safetensors", stored, {"format": "pt"})
        write_text(out / "config.json", json.dumps(self.config() | {"torch_dtype": "bfloat16"}, indent=2) + "\n")
        write_text(out / "provenance.json", provenance)


def run(options: EagleOptions) -> int:
    """Train a head and write its folder."""
    check_data(options.data)
    facts = train(options, Eagle)
    print(f"wrote {Path(options.out)}: {facts['tokens']:,} tokens; held out: {facts['held_out_after']}")
    return 0

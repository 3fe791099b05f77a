# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 head for comparison, as a recipe of our training loop.

`python -m vllm_ppd.benchmarks.models eagle --model M --data train.jsonl --out DIR`
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from vllm_ppd.heads.files import write_json, write_tensors
from vllm_ppd.heads.options import HeadsOptions
from vllm_ppd.heads.training.loop import train
from vllm_ppd.heads.training.recipe import Counts, HeadsRecipe, accepted_counts
from vllm_ppd.heads.training.states import Reads
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch
from vllm_ppd.kernels.unembedding_loss import kl_to_teacher


class EagleOptions(HeadsOptions):
    """Training options of an EAGLE-3 head."""

    kind = "eagle"


class Eagle(HeadsRecipe):
    """An EAGLE-3 head (Li et al., 2025): a decoder layer over [embedding of token t+1,
    fused states of token t], and then over its own output in place of these states.

    Embedding and LM head are the target's. Loss: KL to the target's distribution,
    summed over the drafts, with a weight of DECAY^i.
    """

    DECAY = 0.8  # as in EAGLE-3's training code

    def __init__(self, options: EagleOptions, target: Target) -> None:
        super().__init__(options, target)
        config: Any = target.config
        size = config.hidden_size
        # Layer counts after which its states are read
        third = target.num_layers // 3
        self.read_layers = (third // 5 or 1, third, 2 * third)
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.fc_norm = nn.ModuleList(
            LlamaRMSNorm(size, config.rms_norm_eps) for _ in range(3)
        )
        layer: Any = LlamaDecoderLayer(config, 0)
        attention = layer.self_attn
        for name in (
            "q_proj",
            "k_proj",
            "v_proj",
        ):
            outputs = len(getattr(attention, name).weight)
            setattr(attention, name, nn.Linear(2 * size, outputs, bias=False))
        layer.hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.midlayer = layer  # vLLM's name
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)
        self.to(target.device)

    @property
    def reads(self) -> Reads:
        return Reads(exits=self.read_layers, top_k=16)

    def outputs(
        self, batch: Batch, layers: dict[int, Tensor]
    ) -> Iterator[Tensor]:
        """What the LM head reads of each draft, for every token: [rows, hidden].

        Args:
            batch: the windows.
            layers: the target's states after some layers, [rows, hidden] each.
        """
        shape = batch.input_ids.shape
        layer = self.midlayer
        pairs = zip(self.fc_norm, self.read_layers, strict=True)
        fused = [norm(layers[number].float()) for norm, number in pairs]
        hidden = self.fc(torch.cat(fused, dim=-1))
        hidden = hidden.view(*shape, -1)
        tokens = batch.ahead(self.options.num_speculative_tokens)[0]
        # A draft sees the first drafts up to its place in its document, which begins at
        # position 0, and further ones at its place alone.
        begins = batch.position_ids == 0
        document = begins.cumsum(-1)[:, None]
        is_same = document[..., None] == document[..., None, :]
        mask = is_same.tril()
        place = torch.eye(shape[1], dtype=torch.bool, device=mask.device)
        cache = DynamicCache()
        for draft, inputs in enumerate(tokens.unbind(1)):
            embedded = self.target.embed(inputs.view(shape)).float()
            embedded = layer.input_layernorm(embedded)
            normed = layer.hidden_norm(hidden)
            attended, _ = layer.self_attn(
                torch.cat([embedded, normed], dim=-1),
                self.rotary(hidden, batch.position_ids + draft),
                mask,
                cache,
            )
            hidden = hidden + attended
            normed = layer.post_attention_layernorm(hidden)
            hidden = hidden + layer.mlp(normed)
            mask = torch.cat([mask, place.expand(*mask.shape[:-1], -1)], dim=-1)
            yield self.norm(hidden).flatten(0, 1)

    def loss(self, batch: Batch) -> tuple[Tensor, Counts]:
        drafts = self.options.num_speculative_tokens
        valid = batch.ahead(drafts + 1)[1][:, 1:]
        rows = self.share_of(valid[:, 0])
        if not len(rows):
            return self.nothing(), {}
        states = self.states(batch)
        steps = torch.arange(1, drafts + 1, device=rows.device)
        places = (rows[:, None] + steps).clamp(max=len(valid) - 1)
        index_of, unembedding, bias = self.vocabulary
        greedy = index_of[self.greedy_tokens(states, places)]
        # A distribution without its likeliest token is not learned.
        is_known = greedy >= 0
        is_learned = valid[rows] & is_known
        loss = self.nothing()
        drafted = []
        for draft, output in enumerate(self.outputs(batch, states.layers)):
            kl, best = kl_to_teacher(
                output[rows][None],
                states.final[places[:, draft]],
                unembedding,
                bias,
                compare=not self.training,
                cap=self.target.cap,
            )
            learned = kl[0] * is_learned[:, draft]
            weight = self.DECAY**draft
            loss = loss + weight * learned.mean()
            drafted.append(best[0])
        # In training no tokens are compared
        is_right = torch.stack(drafted, dim=1) == greedy
        return loss, accepted_counts(is_learned & is_right)

    def config(self) -> Any:
        return self.target.config.to_dict() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "fc_norm": True,
            "eagle_aux_hidden_state_layer_ids": self.read_layers,
        }

    def tensors(self) -> dict[str, Tensor]:
        weights = self.state_dict()
        return {name: weight.bfloat16() for name, weight in weights.items()}

    def write(self, out: Path, provenance: dict[str, Any]) -> None:
        """Write the head with its draft vocabulary, and as `whole`, which drafts from
        all tokens.
        """
        config = self.config()
        tensors = self.tensors()
        write_json(out / "whole" / "config.json", config)
        write_tensors(out / "whole" / "model.safetensors", tensors)
        ids = self.token_ids
        if ids is not None:
            size = len(ids)
            config["draft_vocab_size"] = size
            tensors["d2t"] = ids - torch.arange(size).to(ids)
            tensors["lm_head.weight"] = self.vocabulary[1].bfloat16()
        write_tensors(out / "model.safetensors", tensors)
        write_json(out / "config.json", config)
        write_json(out / "provenance.json", provenance)


def run(options: EagleOptions) -> int:
    """Train a head and write its folder."""
    facts = train(options, Eagle)
    print(f"wrote {options.out}; held out: {facts['held_out_after']}")
    return 0

# SPDX-License-Identifier: Apache-2.0
"""The loaded target for drafters: its LM head, further matrices, and its cuts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsMultiModal

from vllm_ppd.model_patches.base import ModelCut
from vllm_ppd.model_patches.branched import BranchedModel, TappedModel
from vllm_ppd.model_patches.token_heads import build_layers
from vllm_ppd.vllm_plugins.engine.lm_head import TargetLMHead
from vllm_ppd.vllm_plugins.engine.packed_linear import PackedLinear


def language_model(model: Any) -> Any:
    """The causal LM within a model that vLLM loaded."""
    return model.get_language_model() if isinstance(model, SupportsMultiModal) else model


class Target:
    """One engine's target.

    Args:
        model: as vLLM loaded it; a multimodal one drafts with its language model.
        vllm_config: vLLM's configuration.
        device: where it is.
    """

    cut: ModelCut

    def __init__(self, model: Any, vllm_config: Any, device: torch.device) -> None:
        self.model, self.vllm_config, self.device = language_model(model), vllm_config, device
        self.is_multimodal = self.model is not model
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self.vocab_size: int = vllm_config.model_config.get_vocab_size()
        self.hidden_size: int = vllm_config.model_config.hf_text_config.hidden_size
        self.max_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        self.lm_head = TargetLMHead(self.model)
        self._adapted = [layer for layer in self.model.modules() if isinstance(layer, VocabParallelEmbeddingWithLoRA)]

    def linear(self, weight: torch.Tensor) -> PackedLinear:
        """y = W x for a matrix [out, in], packed for the platform's fastest product and whole on every rank."""
        return PackedLinear(weight, self.vllm_config, self.device)

    def embedding(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Rows of a table [tokens, size] by token IDs; each rank holds a part of it."""
        with set_current_vllm_config(self.vllm_config), self.device:
            table = VocabParallelEmbedding(*weight.shape, params_dtype=self.dtype)
        table.weight_loader(table.weight, weight)
        return table

    def lm_head_rows(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """E* of some tokens [tokens, hidden] and their bias [tokens], on every rank.

        Raises:
            ValueError: if the model caps its logits, which are then no product of a matrix.
        """
        return self.lm_head.rows(token_ids, self.vllm_config, self.device)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's input embeddings of tokens [tokens], without adapters: [tokens, hidden], on every rank."""
        for layer in self._adapted:  # vLLM sets adapters for its own step's tokens, not for these
            layer.forward = layer.base_layer.forward
        try:
            return self.model.embed_input_ids(token_ids)
        finally:
            for layer in self._adapted:
                del layer.forward

    def cut_after(self, exit_layers: Sequence[int], kind: type[ModelCut] = ModelCut) -> ModelCut:
        """Cut the target after some layers; its forward then runs the cut's.

        Raises:
            ValueError: if the family cannot be cut or a layer is out of range.
        """
        compilation = self.vllm_config.compilation_config
        compiled = compilation.mode != CompilationMode.NONE
        whole = compiled and not self._graphs
        self.cut = kind(self.model, self.vllm_config, exit_layers, whole=whole, embedded=self.is_multimodal)
        self._prepare_graphs()
        return self.cut

    def tapped_after(self, layers: Sequence[int]) -> torch.Tensor:
        """Keep the states after some layers in each forward; returns a buffer [layers, most tokens of a step, hidden].

        Raises:
            ValueError: if the family cannot be cut.
        """
        states = torch.zeros(len(layers), self.max_tokens, self.hidden_size, dtype=self.dtype, device=self.device)
        self.cut = TappedModel(self.model, self.vllm_config, layers, states)
        self._prepare_graphs()
        return states

    def with_token_heads(self, weights: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Run further decoder layers beside the target's last one, each with KV of its own (DynaMo's token heads).

        Args:
            weights: of each layer, by their names in a decoder layer of the target's checkpoint.

        Returns:
            [layers, most tokens of a step, hidden] buffer of their normed hidden states after each forward.

        Raises:
            ValueError: if the family cannot be cut, or weights are missing or unknown.
        """
        cut = self.cut = BranchedModel(self.model, self.vllm_config, embedded=self.is_multimodal)
        layers = build_layers(cut.adapter, self.vllm_config, weights, self.device)
        states = torch.zeros(len(layers), self.max_tokens, self.hidden_size, dtype=self.dtype, device=self.device)
        cut.add_branches(layers, self.vllm_config, states)
        self._prepare_graphs()
        return states

    @property
    def _graphs(self) -> bool:
        return self.vllm_config.compilation_config.cudagraph_mode.has_piecewise_cudagraphs()

    def _prepare_graphs(self) -> None:
        if self._graphs:
            self.cut.allocate_graph_buffers(self.max_tokens, self.hidden_size, self.dtype, self.device)
            # vLLM captures piecewise graphs only for a model with compiled submodules.
            self.model.add_module("vllm_ppd_stacks", nn.ModuleList(self.cut.compiled))

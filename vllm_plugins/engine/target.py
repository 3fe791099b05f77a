# SPDX-License-Identifier: Apache-2.0
"""The loaded target for drafters: its LM head, draft vocabularies, further matrices,
and its cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.lora.layers import BaseLayerWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import (
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.interfaces import SupportsMultiModal

from vllm_ppd.heads.module import columns, most_frequent
from vllm_ppd.kernels.sampling import INVALID
from vllm_ppd.kernels.unembedding_loss import capped
from vllm_ppd.model_patches.base import ModelCut
from vllm_ppd.model_patches.branched import (
    BranchedModel,
    TappedModel,
    build_layers,
)
from vllm_ppd.vllm_plugins.config.options import OptionError
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.engine.temporary import temporarily

Cut = TypeVar("Cut", bound=ModelCut)
# Estimates, not measured. An H100's memory has 3.35 TB/s; with a slower one dividing
# gains more than is counted.
BYTES_PER_SECOND = 3e12
# An all-reduce or all-gather of a few rows over NVLink, in a CUDA graph
SECONDS_PER_COLLECTIVE = 15e-6
UNITS_AT_ONCE = 256  # columns of the LM head that are read by one product


def pays(read: int, ranks: int) -> bool:
    """Whether tensor-parallel ranks that read so many bytes of a matrix each should read
    a part each, and join what they computed by one collective.

    A step of few requests takes as long as its bytes and its collectives. In larger
    batches a collective sends more, but a rank multiplies less, and over NVLink this
    saves more than that costs.
    """
    saved = read - read / ranks
    return saved / BYTES_PER_SECOND > SECONDS_PER_COLLECTIVE


class PackedLinear:
    """y = W x on every rank, W [out, in] in the target's dtype.

    Args:
        weight: W, or this rank's own matrix if it is not to be divided.
        vllm_config, device: of the engine.
        divided: whether each rank holds a part of W's rows.
    """

    def __init__(
        self,
        weight: Tensor,
        vllm_config: Any,
        device: torch.device,
        divided: bool = False,
    ) -> None:
        self.vllm_config = vllm_config
        self.device = device
        self.divided = divided
        self._pack(weight)

    def _pack(self, weight: Tensor) -> None:
        model_config = self.vllm_config.model_config
        rows, columns = weight.shape
        with set_current_vllm_config(self.vllm_config), self.device:
            self.layer = ColumnParallelLinear(
                columns,
                rows,
                bias=False,
                gather_output=True,
                params_dtype=model_config.dtype,
                disable_tp=not self.divided,
            )
        self._copy(weight)
        process_weights_after_loading(self.layer, model_config, self.device)

    def _copy(self, weight: Tensor) -> None:
        self.layer.weight_loader(self.layer.weight, weight)

    def load(self, weight: Tensor) -> None:
        """Replace the matrix by another one of its shape; CUDA graphs read it from then on, too."""
        if self.device.type == "cpu":
            # In a layout of the platform's, and without graphs
            self._pack(weight)
        else:
            self._copy(weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden)[0]


class LMHead:
    """An LM head for any states; each rank holds a shard of the vocabulary, padded to
    shard_size.
    """

    tp_size: int
    vocab_size: int
    vocab_start: int
    num_valid: int
    shard_size: int

    def shard(self, classifiers: Tensor) -> Tensor:
        """This rank's rows of classifiers [..., vocabulary, hidden], padded as the LM head is."""
        rows = classifiers[
            ..., self.vocab_start : self.vocab_start + self.num_valid, :
        ]
        return functional.pad(rows, (0, 0, 0, self.shard_size - self.num_valid))

    def gather(self, logits: Tensor) -> Tensor:
        """The whole vocabulary of sharded logits [..., shard]."""
        if self.tp_size > 1:
            logits = tensor_model_parallel_all_gather(logits, dim=-1)
        return logits[..., : self.vocab_size]


def without_adapters(layer: Any) -> Any:
    """The layer that vLLM wrapped for LoRA, or the layer itself."""
    return layer.base_layer if isinstance(layer, BaseLayerWithLoRA) else layer


class TargetLMHead(LMHead):
    """Logits as in vLLM's own step, but without LoRA adapters, which vLLM sets only for
    the rows of its step.

    Args:
        model: the loaded causal LM.
        vllm_config, device: of the engine.
    """

    def __init__(
        self, model: Any, vllm_config: Any, device: torch.device
    ) -> None:
        self.model_config = vllm_config.model_config
        self.device = device
        lm_head = getattr(model, "lm_head", None)
        if lm_head is None:
            # Gemma 2 and Cohere read their embeddings.
            inner = getattr(model, "model", None)
            lm_head = getattr(inner, "embed_tokens", None)
        if lm_head is None:
            raise OptionError(
                f"{type(model).__name__} has no lm_head, which drafts are read by; use "
                "method 'lookup'"
            )
        self.lm_head: Any = without_adapters(lm_head)
        self.logits_processor: Any = without_adapters(model.logits_processor)
        shard = self.lm_head.shard_indices
        self.tp_size = self.lm_head.tp_size
        self.vocab_size = self.logits_processor.org_vocab_size
        self.vocab_start = shard.org_vocab_start_index
        self.num_valid = shard.org_vocab_end_index - self.vocab_start
        self.shard_size = self.lm_head.num_embeddings_per_partition

    def logits(self, hidden: Tensor, gather: bool = True) -> Tensor:
        return self.logits_processor(
            self.lm_head, hidden, self.bias, skip_gather=not gather
        )

    @property
    def bias(self) -> Tensor | None:
        """[shard_size], the parameter itself; None if the LM head has none."""
        return getattr(self.lm_head, "bias", None)

    @property
    def cap(self) -> float | None:
        """Of the scaled logits; None if the model does not cap them."""
        processor = self.logits_processor
        return processor.soft_cap and processor.soft_cap * processor.scale

    def rows(self, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rows of E* [tokens, hidden] and their bias [tokens], scaled but not capped.

        Those of a quantized LM head, and of a shard, which may be packed, are products
        with unit vectors. These have no bias: a bias would round
        them, and subtracting it again would not restore them.

        Args:
            token_ids: [tokens], whose rows are read on every rank; None: this rank's
                shard.
        """
        whole = token_ids is not None
        which = slice(None) if token_ids is None else token_ids
        dtype = self.model_config.dtype
        hidden_size = self.model_config.hf_text_config.hidden_size
        units = torch.eye(hidden_size, dtype=dtype, device=self.device)
        zero = torch.zeros_like(units[:1])
        weight = getattr(self.lm_head, "weight", None)
        columns = []
        with temporarily(self.logits_processor, soft_cap=None):
            bias = self.logits(zero, whole)[0, which].to(dtype)
            if whole and weight is not None and weight.dtype == dtype:
                rows = VocabParallelEmbedding.forward(self.lm_head, token_ids)
                return rows * self.logits_processor.scale, bias
            for part in units.split(UNITS_AT_ONCE):
                product = self.logits_processor(
                    self.lm_head, part, None, skip_gather=not whole
                )
                columns.append(product[:, which].to(dtype))
        return torch.cat(columns).t().contiguous(), bias


class CopiedLMHead(LMHead):
    """The target's LM head on a pipeline stage without one; a reader of exits takes it in
    place of a DraftVocabulary.

    Args:
        shard: [shard_size, hidden] of this rank.
        bias: [shard_size].
        place: vocab_size, vocab_start, num_valid of the shard's rank.
        vllm_config, device: of the engine.
    """

    token_ids: Tensor | None = None  # the whole vocabulary

    def __init__(
        self,
        shard: Tensor,
        bias: Tensor,
        place: list[int],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        self.vocab_size, self.vocab_start, self.num_valid = place
        self.shard_size = len(shard)
        self.tp_size = vllm_config.parallel_config.tensor_parallel_size
        self.unembedding = PackedLinear(shard, vllm_config, device)
        self.bias = bias

    def load(self, shard: Tensor, bias: Tensor) -> None:
        """Replace the shard and its bias by others of their shapes."""
        self.unembedding.load(shard)
        self.bias.copy_(bias)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.gather(self.unembedding(hidden) + self.bias)


class DraftVocabulary:
    """The tokens that may be drafted: the most frequent ones, or all, and their logits
    on every rank.

    Args:
        config: options; their size of the draft vocabulary may be None.
        heads, tensors: of the heads, with the tokens' counts in their training data.
        target: whose LM head is read.
        reads_lm_head: false for heads with their own LM heads.
    """

    def __init__(
        self,
        config: DraftingConfig,
        heads: Any,
        tensors: dict[str, Tensor],
        target: Target,
        reads_lm_head: bool = True,
    ) -> None:
        self.target = target
        self.lm_head = target.lm_head
        # [size]; None: the whole vocabulary
        self.token_ids: Tensor | None = None
        self.size = config.draft_vocab_size or target.vocab_size
        # Rows of the LM head, and their bias
        self.linear: PackedLinear | None = None
        # [size], or of this rank's shard; None if the LM head has none
        self.bias: Any = self.lm_head.bias
        if config.draft_vocab_size is None:
            return
        counts = tensors[str(heads.counts_tensor)]
        self.token_ids = most_frequent(counts, self.size).to(target.device)
        invalid = self.token_ids.new_tensor([INVALID])
        self._ids = torch.cat([self.token_ids, invalid])
        self._entries = columns(self.token_ids, len(counts))
        self.bias = None
        if reads_lm_head:
            rows, self.bias = self.lm_head.rows(self.token_ids)
            self.linear = target.linear(rows)

    def choose(self, counts: Tensor) -> None:
        """Draft the most frequent tokens of other counts [vocabulary], in place."""
        if self.token_ids is not None:
            self.token_ids.copy_(most_frequent(counts, self.size))
            self._ids[:-1] = self.token_ids
            self._entries.copy_(columns(self.token_ids, len(counts)))
            self.refresh()

    def refresh(self) -> None:
        """Copy the rows of the LM head again, after its weights have changed."""
        if self.linear is not None:
            rows, bias = self.lm_head.rows(self.token_ids)
            self.linear.load(rows)
            self.bias.copy_(bias)
        elif self.token_ids is None:
            self.bias = self.lm_head.bias

    def ids(self, entries: Tensor) -> Tensor:
        """Token IDs of entries; INVALID ones stay."""
        return entries if self.token_ids is None else self._ids[entries]

    def entries(self, token_ids: Tensor) -> Tensor:
        """Entries of token IDs, -1 for others."""
        return token_ids if self.token_ids is None else self._entries[token_ids]

    def logits(self, hidden: Tensor) -> Tensor:
        """The LM head's logits of states [rows, hidden]: [rows, size]."""
        if self.linear is None:
            return self.lm_head.logits(hidden)
        return capped(self.linear(hidden) + self.bias, self.lm_head.cap)

    def shard(self, classifiers: Tensor) -> Tensor:
        """The drafted tokens' rows of classifiers [..., vocabulary, hidden], or this
        rank's shard of them.
        """
        if self.token_ids is None:
            return self.lm_head.shard(classifiers)
        return classifiers[..., self.token_ids.to(classifiers.device), :]

    def classifiers(self, weight: Tensor) -> PackedLinear:
        """y = W x for the rows of shard()."""
        whole = self.token_ids is None
        linear = self.target.linear_of_rank if whole else self.target.linear
        return linear(self.shard(weight).flatten(0, -2))

    def gather(self, logits: Tensor) -> Tensor:
        """The logits [..., size] of the products of classifiers."""
        return self.lm_head.gather(logits) if self.token_ids is None else logits


class Target:
    """One engine's target.

    Args:
        model: as vLLM loaded it; a multimodal one drafts with its language model.
        vllm_config: vLLM's configuration.
        device: where it is.
    """

    cut: ModelCut
    # The sum of the ranks' tensors, on every rank
    all_reduce = staticmethod(tensor_model_parallel_all_reduce)

    def __init__(
        self, model: Any, vllm_config: Any, device: torch.device
    ) -> None:
        self.is_multimodal = isinstance(model, SupportsMultiModal)
        self.model = model.get_language_model() if self.is_multimodal else model
        self.vllm_config = vllm_config
        self.device = device
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self.vocab_size: int = vllm_config.model_config.get_vocab_size()
        self.hidden_size: int = (
            vllm_config.model_config.hf_text_config.hidden_size
        )
        self.max_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        # Some multimodal models have it beside their language model
        has_own = hasattr(self.model, "logits_processor")
        self._with_lm_head = self.model if has_own else model
        self._adapted = [
            layer
            for layer in self.model.modules()
            if isinstance(layer, VocabParallelEmbeddingWithLoRA)
        ]

    @cached_property
    def lm_head(self) -> TargetLMHead:
        """The target's own, which lookups do not need."""
        return TargetLMHead(self._with_lm_head, self.vllm_config, self.device)

    def linear(self, weight: Tensor) -> PackedLinear:
        """y = W x on every rank for a matrix [out, in], packed for the platform's fastest
        product. The ranks divide its rows if that pays.
        """
        divided = self.divides([weight], len(weight))
        return PackedLinear(weight, self.vllm_config, self.device, divided)

    def linear_of_rank(self, weight: Tensor) -> PackedLinear:
        """y = W x for a matrix [out, in] of this rank alone."""
        return PackedLinear(weight, self.vllm_config, self.device)

    def divides(self, weights: Iterable[Tensor], *sizes: int) -> bool:
        """Whether the ranks should divide weights whose products one collective joins,
        along dimensions of some sizes.
        """
        ranks = get_tensor_model_parallel_world_size()
        read = sum(weight.numel() for weight in weights) * self.dtype.itemsize
        return pays(read, ranks) and not any(size % ranks for size in sizes)

    def part(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of a tensor, along a dimension that the ranks divide: a view."""
        size = tensor.shape[dim] // get_tensor_model_parallel_world_size()
        start = get_tensor_model_parallel_rank() * size
        return tensor.narrow(dim, start, size)

    def embedding(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """Rows of a table [tokens, size] by token IDs; each rank holds a part of it."""
        with set_current_vllm_config(self.vllm_config), self.device:
            table = VocabParallelEmbedding(*weight.shape, params_dtype=self.dtype)
        table.weight_loader(table.weight, weight)
        return table

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's input embeddings of tokens [tokens], without adapters: [tokens,
        hidden], on every rank.
        """
        for layer in (
            self._adapted
        ):  # vLLM sets adapters for its own step's tokens, not for these
            layer.forward = layer.base_layer.forward
        try:
            return self.model.embed_input_ids(token_ids)
        finally:
            for layer in self._adapted:
                del layer.forward

    def cut_after(self, exit_layers: Sequence[int], kind: type[Cut]) -> Cut:
        """Cut the target after some layers; its forward then runs the cut's.

        Raises:
            ValueError: if the family cannot be cut or a layer is out of range.
        """
        compilation = self.vllm_config.compilation_config
        compiled = compilation.mode != CompilationMode.NONE
        whole = compiled and not self._graphs
        cut = self.cut = kind(
            self.model,
            self.vllm_config,
            exit_layers,
            whole=whole,
            embedded=self.is_multimodal,
        )
        self._prepare_graphs()
        return cut

    def tapped_after(self, layers: Sequence[int]) -> Tensor:
        """Keep the states after some layers in each forward; returns a buffer [layers,
        most tokens of a step, hidden].

        Raises:
            ValueError: if the family cannot be cut.
        """
        states = self._states(len(layers))
        self.cut = TappedModel(self.model, self.vllm_config, layers, states)
        self._prepare_graphs()
        return states

    def with_token_heads(self, weights: list[dict[str, Tensor]]) -> Tensor:
        """Run further decoder layers beside the target's last one, each with KV of its
        own (DynaMo's token heads).

        Args:
            weights: of each layer, by their names in a decoder layer of the target's
                checkpoint.

        Returns:
            [layers, most tokens of a step, hidden] buffer of their normed hidden states
            after each forward.

        Raises:
            ValueError: if the family cannot be cut, or weights are missing or unknown.
        """
        cut = self.cut = BranchedModel(
            self.model, self.vllm_config, embedded=self.is_multimodal
        )
        layers = build_layers(cut.adapter, self.vllm_config, weights, self.device)
        states = self._states(len(layers))
        cut.add_branches(layers, self.vllm_config, states)
        self._prepare_graphs()
        return states

    def _states(self, layers: int) -> Tensor:
        """A buffer [layers, max_tokens, hidden]."""
        return torch.zeros(
            layers,
            self.max_tokens,
            self.hidden_size,
            dtype=self.dtype,
            device=self.device,
        )

    @property
    def _graphs(self) -> bool:
        return self.vllm_config.compilation_config.cudagraph_mode.has_piecewise_cudagraphs()

    def _prepare_graphs(self) -> None:
        if self._graphs:
            self.cut.allocate_graph_buffers(
                self.max_tokens, self.hidden_size, self.dtype, self.device
            )
            # vLLM captures piecewise graphs only for a model with compiled submodules.
            self.model.add_module(
                "vllm_ppd_stacks", nn.ModuleList(self.cut.compiled)
            )

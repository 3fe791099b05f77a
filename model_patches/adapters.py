# SPDX-License-Identifier: Apache-2.0
"""The adapters of families that are cut: vLLM's own decoders, Granite, and those that
vLLM serves through its Transformers backend; and the final norm outside of compiled code.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from vllm import ir
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from vllm_ppd.model_patches.base import Adapter, CutState

if TYPE_CHECKING:
    from vllm_ppd.model_patches.base import ModelCut

NORMS = ("norm", "final_layer_norm")
KERNEL = "vllm_c"  # vLLM's name for its compiled kernels


class LlamaLikeAdapter(Adapter):
    """Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, Gemma 3, Phi-3, GLM-4, Llama 4, gpt-oss."""

    has_residual = True

    def embed(self, input_ids: Tensor) -> Tensor:
        # The decoder's method, not the embedding table: Gemma scales embeddings here.
        return self.decoder.embed_input_ids(input_ids)

    def run(
        self,
        layers: Sequence[nn.Module],
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
    ) -> CutState:
        for layer in layers:
            # Arguments go by name: gpt-oss takes them in another order.
            hidden, residual = layer(
                positions=positions, hidden_states=hidden, residual=residual
            )
        return hidden, residual

    def norm(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        return self.decoder.norm(hidden, residual)[0]

    def forward_of(self, cut: ModelCut) -> Any:
        def forward(
            input_ids: Tensor | None,
            positions: Tensor,
            intermediate_tensors: IntermediateTensors | None = None,
            inputs_embeds: Tensor | None = None,
            **_: Any,
        ) -> Tensor | IntermediateTensors:
            state = None
            if intermediate_tensors is not None:
                state = (
                    intermediate_tensors["hidden_states"],
                    intermediate_tensors["residual"],
                )
            output = cut.forward(input_ids, positions, state, inputs_embeds)
            if isinstance(output, Tensor):
                return output
            return IntermediateTensors(
                {"hidden_states": output[0], "residual": output[1]}
            )

        return forward


class GraniteAdapter(LlamaLikeAdapter):
    """Adapter for Granite."""

    has_residual = False

    def embed(self, input_ids: Tensor) -> Tensor:
        return (
            self.decoder.embed_input_ids(input_ids)
            * self.decoder.config.embedding_multiplier
        )

    def run(
        self,
        layers: Sequence[nn.Module],
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
    ) -> CutState:
        for layer in layers:
            hidden = layer(positions, hidden)
        return hidden, None

    def norm(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        return self.decoder.norm(hidden)


class TransformersAdapter(Adapter):
    """Adapter without a residual stream; Transformers' modules expect a batch dimension of one."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.final_norm: nn.Module = next(
            getattr(self.decoder, name)
            for name in NORMS
            if hasattr(self.decoder, name)
        )
        # OLMo 3 has separate rotary embeddings for sliding-window and full-attention
        # layers.
        by_kind = (
            "layer_type"
            in inspect.signature(self.decoder.rotary_emb.forward).parameters
        )
        self.kinds: list[str] | None = (
            list(self.decoder.config.layer_types) if by_kind else None
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.decoder.get_input_embeddings()(input_ids)

    def run(
        self,
        layers: Sequence[nn.Module],
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
    ) -> CutState:
        batch = hidden[None]
        position_ids = positions[None]
        rotary: Any = None
        if self.kinds is None:
            rotary = self.decoder.rotary_emb(batch, position_ids=position_ids)
        for layer in layers:
            if self.kinds is not None:
                kind = self.kinds[layer.self_attn.layer_idx]  # type: ignore[union-attr, index]
                rotary = self.decoder.rotary_emb(batch, position_ids, kind)
            batch = layer(
                batch,
                attention_mask=None,
                position_ids=position_ids,
                position_embeddings=rotary,
            )
        return batch[0], None

    def norm(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        return self.final_norm(hidden)

    def forward_of(self, cut: ModelCut) -> Any:
        def forward(
            input_ids: Tensor, position_ids: Tensor, **_: Any
        ) -> tuple[Tensor]:
            hidden = cut.forward(input_ids[0], position_ids[0])
            assert isinstance(hidden, Tensor)  # one pipeline stage
            return (hidden[None],)

        return forward


@contextmanager
def kernels_first() -> Iterator[None]:
    """Let vLLM's RMSNorm run as one kernel if the platform has it; otherwise nothing changes."""
    with ExitStack() as undo:
        for op in _norms() if current_platform.is_cuda_alike() else ():
            priority = op.get_priority()
            if KERNEL in op.impls and priority[:1] != [KERNEL]:
                undo.enter_context(
                    op.set_priority([KERNEL, *(priority or ["native"])])
                )
        yield


def _norms() -> tuple[Any, ...]:
    return ir.ops.rms_norm, ir.ops.fused_add_rms_norm

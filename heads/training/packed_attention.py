# SPDX-License-Identifier: Apache-2.0
"""Attention within packed documents: xformers' BlockDiagonalCausalMask on CUDA, the same mask with SDPA elsewhere.

Documents are recognised by their position ids, which restart at zero. transformers builds that mask for SDPA itself.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

NAME = "vllm_ppd_xformers"


def packed_attention(device: torch.device) -> str | None:
    """The attention implementation to load a model with; None is transformers' choice: SDPA where a family has it."""
    if device.type != "cuda" or importlib.util.find_spec("xformers") is None:
        return None
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, xformers_attention)
    return NAME


def packed_masks(config: Any, position_ids: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Masks of packed documents [windows, length], by the kinds of layers of a family that has two of them."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    shaped = torch.empty(*position_ids.shape, 1, dtype=dtype, device=position_ids.device)
    given: dict[str, Any] = {"config": config, "inputs_embeds": shaped, "attention_mask": None, "past_key_values": None}
    return {
        "full_attention": create_causal_mask(**given, position_ids=position_ids),
        "sliding_attention": create_sliding_window_causal_mask(**given, position_ids=position_ids),
    }


def document_lengths(position_ids: torch.Tensor) -> list[int]:
    """Tokens of each document in packed windows [windows, length], in order; a window's start also starts one."""
    starts = position_ids == 0
    starts[:, 0] = True
    edges = torch.nonzero(starts.flatten()).flatten().tolist()
    return [b - a for a, b in zip(edges, [*edges[1:], position_ids.numel()], strict=True)]


def xformers_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [windows, heads, length, head size]
    key: torch.Tensor,  # [windows, KV heads, length, head size]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """One call over all documents of all windows: [windows, length, heads, head size]."""
    if key.shape[2] != query.shape[2]:  # generation with a KV cache: nothing is packed, and keys are older than queries
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )  # fmt: skip
    from xformers.ops import memory_efficient_attention
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

    assert position_ids is not None, "packed attention needs position ids"
    windows, heads, length, size = query.shape
    if position_ids.shape[0] != windows:
        position_ids = position_ids.expand(windows, -1)
    mask = BlockDiagonalCausalMask.from_seqlens(document_lengths(position_ids.clone()))
    window = getattr(module, "sliding_window", None)
    if window is not None:
        mask = mask.make_local_attention(window)
    groups = heads // key.shape[1]
    rows = [
        x.repeat_interleave(n, dim=1).transpose(1, 2).reshape(1, windows * length, heads, size)
        for x, n in ((query, 1), (key, groups), (value, groups))
    ]
    out = memory_efficient_attention(*rows, attn_bias=mask, p=dropout, scale=scaling)
    return out.view(windows, length, heads, size), None

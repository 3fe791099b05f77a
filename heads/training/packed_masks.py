# SPDX-License-Identifier: Apache-2.0
"""Attention masks of packed documents, which transformers recognises by their position ids: these restart at zero."""

from __future__ import annotations

from typing import Any

import torch


def packed_masks(config: Any, position_ids: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Masks of packed documents [windows, length], by the kinds of layers of a family that has two of them."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    shaped = torch.empty(*position_ids.shape, 1, dtype=dtype, device=position_ids.device)
    given: dict[str, Any] = {"config": config, "inputs_embeds": shaped, "attention_mask": None, "past_key_values": None}
    return {
        "full_attention": create_causal_mask(**given, position_ids=position_ids),
        "sliding_attention": create_sliding_window_causal_mask(**given, position_ids=position_ids),
    }

# SPDX-License-Identifier: Apache-2.0
"""Attention of a training's packed windows by xformers, which computes no pairs of tokens
of different documents.

It is an attention of transformers' registry, so every family that reads the registry has
it. xformers is optional (`pip install vllm-ppd[xformers]`).
"""

import itertools
from importlib.util import find_spec
from typing import Any

from torch import Tensor

NAME = "ppd_xformers"  # in the registry
LAYERS = {"full_attention", "sliding_attention"}


class PackedAttention:
    """An attention over the documents of one batch at a time."""

    def __init__(self) -> None:
        from transformers import AttentionInterface
        from xformers.ops import memory_efficient_attention
        from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

        self.attend: Any = memory_efficient_attention
        self.make_mask = BlockDiagonalCausalMask.from_seqlens
        AttentionInterface.register(NAME, self)

    def read(self, position_ids: Tensor) -> None:
        """Find the documents of windows [windows, length], whose positions begin at 0."""
        positions = position_ids.flatten()
        bounds = (positions == 0).nonzero().flatten().tolist()
        pairs = itertools.pairwise([*bounds, len(positions)])
        lengths = [end - begin for begin, end in pairs]
        self.mask = self.make_mask(lengths, device=positions.device)

    def __call__(
        self,
        module: Any,
        query: Tensor,  # [windows, heads, length, size]
        key: Tensor,  # [windows, KV heads, length, size]
        value: Tensor,
        *_: Any,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **__: Any,
    ) -> tuple[Tensor, None]:
        """The attention's output [windows, length, heads, size], without weights."""
        rows = []
        for states in (query, key, value):
            groups = query.shape[1] // states.shape[1]
            every = states.repeat_interleave(groups, dim=1)
            rows.append(every.transpose(1, 2).flatten(0, 1)[None])
        mask = self.mask
        if sliding_window is not None:
            mask = mask.make_local_attention(sliding_window)
        output = self.attend(*rows, attn_bias=mask, scale=scaling)
        return output.unflatten(1, (len(query), -1))[0], None


def packed_attention(target: Any) -> PackedAttention | None:
    """xformers' attention for a Target, which then has it; None if xformers is missing,
    or if the device or the family does not suit it.
    """
    config = target.config
    layers = getattr(config, "layer_types", None) or LAYERS
    fits = target.device.type == "cuda" and LAYERS.issuperset(layers)
    capped = getattr(config, "attn_logit_softcapping", None)
    if not fits or target.passes_masks or capped or find_spec("xformers") is None:
        return None
    packed = PackedAttention()
    target.model.set_attn_implementation(NAME)
    return packed

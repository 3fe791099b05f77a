# SPDX-License-Identifier: Apache-2.0
"""Tokens in flight: tokens at equal depth, before the same layer, run together as a token group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context

from vllm_ppd.model_patches.stacked_layers import StackedLayers
from vllm_ppd.vllm_plugins.engine.outside_steps import unseen_by_connectors
from vllm_ppd.vllm_plugins.engine.v1.passes import Span, SpanAttention


@dataclass
class TokenGroup:
    """One token each of some requests, all at equal depth: before the same layer."""

    requests: np.ndarray  # [tokens] indices in the plan, each request at most once
    offsets: np.ndarray  # [tokens] from the request's base token
    rows: np.ndarray  # [tokens] batch rows
    positions: np.ndarray  # [tokens]
    hidden: torch.Tensor  # [tokens, hidden]
    residual: torch.Tensor  # [tokens, hidden]
    layer: int = 0
    context: tuple[dict[str, Any], dict[str, torch.Tensor]] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.requests)

    def kept(self, keep: np.ndarray, index: torch.Tensor) -> TokenGroup:
        """The group with some of its tokens; `index` has the indices of `keep`, on the device."""
        return TokenGroup(
            self.requests[keep], self.offsets[keep], self.rows[keep], self.positions[keep],
            self.hidden[index], self.residual[index], self.layer,
        )  # fmt: skip


def evenly_spaced(layers: Sequence[int]) -> list[slice]:
    """Ascending layers as a few slices with steps: [1, 4, 7, 9] as 1:8:3 and 9:10:1."""
    runs, start = [], 0
    while start < len(layers):
        stop = min(start + 2, len(layers))
        step = layers[stop - 1] - layers[start] or 1
        while stop < len(layers) and layers[stop] - layers[stop - 1] == step:
            stop += 1
        runs.append(slice(layers[start], layers[stop - 1] + 1, step))
        start = stop
    return runs


# Their builders have a single set of buffers, which the metadata of another group overwrites.
UNFIT_BACKENDS = ("FLASHINFER", "FLEX_ATTENTION")


class ParallelLayers:
    """Runs token groups side by side: those before evenly spaced layers go through one batched product per projection.

    Two groups are always evenly spaced; with one exit at l, all L/l groups of a step are. A batched product has one
    distance between its matrices, so three groups at uneven distances, which several exits can cause, take two.
    """

    def __init__(self, runner: Any, stacked: StackedLayers) -> None:
        """Raises: ValueError if the attention backend cannot hold several groups' metadata at once."""
        backend = stacked.layers[0].self_attn.attn.attn_backend.get_name()
        if backend in UNFIT_BACKENDS:
            raise ValueError(
                f"attention backend {backend} is not supported with schedule 'parallel'; use --attention-backend "
                "FLASH_ATTN or TRITON_ATTN, or schedule 'deferred'"
            )
        self.runner, self.stacked = runner, stacked
        self.attention = SpanAttention(runner)
        self.names = [layer.self_attn.attn.layer_name for layer in stacked.layers]

    def advance(self, groups: list[TokenGroup], num_layers: int) -> None:
        """Run every group through a number of layers, in place.

        Args:
            groups: before ascending layers, at least num_layers apart.
            num_layers: at most the layers that the last group has left.
        """
        metadata: dict[str, Any] = {}
        slots: dict[str, torch.Tensor] = {}
        for group in groups:
            if group.context is None:
                group.context = self._context(group)
            for name in self.names[group.layer : group.layer + num_layers]:
                metadata[name], slots[name] = group.context[0][name], group.context[1][name]
        num_tokens = sum(map(len, groups))
        with (
            unseen_by_connectors(),
            set_forward_context(
                metadata,
                self.runner.vllm_config,
                num_tokens=num_tokens,
                slot_mapping=slots,
                is_padding=self.runner._prepare_padding_mask(num_tokens, num_tokens),
            ),
        ):
            first = 0
            for run in evenly_spaced([group.layer for group in groups]):
                members = groups[first : first + len(range(run.start, run.stop, run.step))]
                self._run(members, run, num_layers)
                first += len(members)

    def _run(self, groups: list[TokenGroup], which: slice, num_layers: int) -> None:
        counts = [len(group) for group in groups]
        most = max(counts)
        positions = np.zeros((len(groups), most), dtype=np.int64)
        for row, group in zip(positions, groups, strict=True):
            row[: len(group)] = group.positions
        at = torch.from_numpy(positions).to(self.runner.device, non_blocking=True)
        hidden = _padded([group.hidden for group in groups], most)
        residual = _padded([group.residual for group in groups], most)
        for step in range(num_layers):
            layers = slice(which.start + step, which.stop + step, which.step)
            hidden, residual = self.stacked.run_layers(layers, counts, at, hidden, residual)
        for place, group in enumerate(groups):
            group.hidden, group.residual = hidden[place, : len(group)], residual[place, : len(group)]
            group.layer += num_layers

    def _context(self, group: TokenGroup) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        span = Span(group.rows, group.positions, np.ones(len(group), dtype=np.int64))
        positions = torch.from_numpy(group.positions).to(self.runner.device, non_blocking=True)
        return self.attention.build(self.attention.all_layers(), span, positions, len(group))


def _padded(parts: list[torch.Tensor], rows: int) -> torch.Tensor:
    """[parts, rows, hidden], zeros behind each part's own rows."""
    if all(len(part) == rows for part in parts):
        return torch.stack(parts)
    padded = parts[0].new_zeros(len(parts), rows, parts[0].shape[1])
    for place, part in zip(padded, parts, strict=True):
        place[: len(part)] = part
    return padded

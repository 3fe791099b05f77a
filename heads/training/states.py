# SPDX-License-Identifier: Apache-2.0
"""A cache of the frozen target's states on disk, computed when a window is first read
and reused afterwards.

A recipe names in `reads` what it learns from, and gets it from `Recipe.states(batch)`,
cached or not.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.files import digest_of_value
from vllm_ppd.heads.text import place
from vllm_ppd.heads.training.target import Target, TargetStates
from vllm_ppd.heads.training.tokens import SPLITS, Batch, TokenStore
from vllm_ppd.kernels.unembedding_loss import top_log_probs

FORMAT = 3  # incremented when the same target and tokens give different files
GB = 1e9


class Reads(NamedTuple):
    """What a kind of heads reads of the target in addition to the final states."""

    exits: tuple[int, ...] = ()  # layer counts after which the normed state is needed
    stem: bool = False  # whether the last decoder layer's arguments are needed
    # Number of likeliest next tokens whose log-probabilities are distilled
    top_k: int = 0


def read_target(target: Target, batch: Batch, reads: Reads) -> TargetStates:
    """The requested states of the target, by one forward pass."""
    states = target.run(batch, reads.exits, reads.stem)
    if reads.top_k:
        states.top_ids, states.top_log_probs = top_log_probs(
            states.final, reads.top_k, target.unembedding, target.bias
        )
    return states


class StatesCache:
    """A safetensors file for each window, in a folder named after target, tokens and
    length.

    A file has states [length, hidden] in bfloat16, those after a layer before the norm
    and the final ones after it, and ids and log-probabilities [length, k] of the
    likeliest tokens. Kinds of heads share a folder: tensors that a file lacks are
    computed by a pass of the target and added.

    Args:
        folder: of all caches.
        target: frozen.
        store: the tokens.
        reads: the states to cache.
        most_bytes: the most bytes in `folder`.

    Raises:
        TrainingError: if that is too little, or the disk lacks room.
    """

    def __init__(
        self,
        folder: Path,
        target: Target,
        store: TokenStore,
        reads: Reads,
        most_bytes: int,
    ) -> None:
        self.target = target
        self.reads = reads
        before_stem = {target.num_layers - 1} if reads.stem else set()
        self.layers = tuple(sorted(before_stem.union(reads.exits)))
        tokens = [
            hashlib.sha256(store.tokens[split].data).hexdigest() for split in SPLITS
        ]
        key = digest_of_value([FORMAT, target.digest(), tokens, store.length])
        self.folder = folder / key[:16]
        self._check_room(folder, store, most_bytes)

    def states(self, batch: Batch) -> TargetStates:
        """The states that `reads` names, for windows of the store's grid, as Target.run
        returns them. If a window lacks any, those of the batch are computed.

        Returns:
            Final states and exits [rows, hidden] in the target's dtype and on the
            batch's device, and top-k targets.
        """
        target = self.target
        reads = self.reads
        names = {layer: f"layer-{layer}" for layer in self.layers}
        top_ids = f"top-{reads.top_k}.ids"
        top_log = f"top-{reads.top_k}.log"
        needed = {"final", *names.values()}
        if reads.top_k:
            needed |= {top_ids, top_log}
        paths = [
            self.folder / f"{batch.split}-{window}.safetensors"
            for window in batch.windows
        ]
        stored = [load_file(path) if path.exists() else {} for path in paths]
        if any(needed - tensors.keys() for tensors in stored):
            wanted = Reads(exits=self.layers, top_k=reads.top_k)
            computed = read_target(target, batch, wanted)
            rows = {"final": computed.final.bfloat16()}
            for layer, name in names.items():
                rows[name] = computed.layers[layer].bfloat16()
            if computed.top_ids is not None and computed.top_log_probs is not None:
                rows[top_ids] = computed.top_ids.int()
                rows[top_log] = computed.top_log_probs.half()
            for name, values in rows.items():
                parts = values.detach().cpu().chunk(len(stored))
                for tensors, part in zip(stored, parts, strict=True):
                    tensors[name] = part.contiguous()
            for path, tensors in zip(paths, stored, strict=True):
                part_file = path.with_suffix(".part")
                save_file(tensors, part_file)
                part_file.replace(path)  # a kill leaves no half of a file

        def joined(name: str, dtype: torch.dtype) -> torch.Tensor:
            # Converted first: autocast to bfloat16 refuses to join float16.
            values = torch.cat([tensors[name].to(dtype) for tensors in stored])
            return values.to(batch.input_ids.device)

        final = joined("final", target.dtype)
        layers = {layer: joined(name, target.dtype) for layer, name in names.items()}
        with torch.no_grad():
            states = target.states_of(batch, final, layers, reads.exits, reads.stem)
        if reads.top_k:
            states.top_ids = joined(top_ids, torch.int64)
            states.top_log_probs = joined(top_log, torch.float32)
        return states

    def _check_room(self, folder: Path, store: TokenStore, most_bytes: int) -> None:
        """Make the folder, or refuse a cache that would not fit."""
        windows = sum(store.num_windows(split) for split in SPLITS)
        row = (
            2 * self.target.hidden_size * (1 + len(self.layers)) + 6 * self.reads.top_k
        )
        needed = windows * store.length * row
        others = sum(
            path.stat().st_size
            for path in folder.glob("*/*")
            if path.parent != self.folder
        )
        if needed + others > most_bytes:
            raise TrainingError(
                f"--states-cache needs {needed / GB:.2f} GB besides the "
                f"{others / GB:.2f} GB of other data there, but --states-cache-gb "
                f"allows {most_bytes / GB:g}; raise it, or delete old folders in "
                f"{place(folder)}"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if needed > free and not any(self.folder.iterdir()):
            raise TrainingError(
                f"--states-cache needs {needed / GB:.2f} GB, but the disk of "
                f"{place(folder)} has {free / GB:.2f} GB free; give another folder, "
                "or leave the cache out"
            )

# SPDX-License-Identifier: Apache-2.0
"""A cache of the frozen target's states on disk, computed when a window is first read and reused afterwards.

A recipe names in `reads` what it learns from, and gets it from `Recipe.states(batch)`, cached or not.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.files import digest_of_value
from vllm_ppd.heads.quote import place
from vllm_ppd.heads.training.target import Target, TargetStates
from vllm_ppd.heads.training.tokens import SPLITS, Batch, TokenStore
from vllm_ppd.kernels.unembedding_loss import top_log_probs

FORMAT = 3  # incremented when the same target and tokens give different files
GB = 1e9


class Reads(NamedTuple):
    """What a kind of heads reads of the target in addition to the final states."""

    exits: tuple[int, ...] = ()  # layer counts after which the normed state is needed
    stem: bool = False  # whether the last decoder layer's arguments are needed
    top_k: int = 0  # number of likeliest next tokens whose log-probabilities are distilled


class _Column(NamedTuple):
    """The values per token in a file of the cache."""

    name: str
    dtype: type[np.generic]  # int16 holds the bits of bfloat16
    width: int


class _File(NamedTuple):
    """A column of a split."""

    values: np.memmap  # [windows, length, width]
    written: np.memmap  # [windows] bool: whether the window's values are there


def read_target(target: Target, batch: Batch, reads: Reads, cache: StatesCache | None = None) -> TargetStates:
    """The requested states of the target (TargetStates), from a cache of these reads or by one forward pass."""
    if cache is not None and batch.windows:
        return cache.states(batch)
    states = target.run(batch, reads.exits, reads.stem)
    if reads.top_k:
        states.top_ids, states.top_log_probs = top_log_probs(states.final, reads.top_k, target.unembedding, target.bias)
    return states


class StatesCache:
    """Memory-mapped files, one for each tensor and split, in a folder named after target, tokens and length.

    Kinds of heads share a folder: each reads the files that it needs, and a window that a file lacks
    is computed by one pass of the target. States after a layer are stored before the norm, in
    bfloat16, and the final ones after it.

    Args:
        folder: of all caches.
        target: frozen.
        store: the tokens.
        reads: the states to cache.
        most_bytes: the most bytes in `folder`.

    Raises:
        TrainingError: if that is too little, or the disk lacks room.
    """

    def __init__(self, folder: Path, target: Target, store: TokenStore, reads: Reads, most_bytes: int) -> None:
        self.target, self.store, self.reads = target, store, reads
        before_stem = {target.num_layers - 1} if reads.stem else set()
        self.layers = tuple(sorted(before_stem.union(reads.exits)))
        self.columns = [_Column("final", np.int16, target.hidden_size)]
        for layer in self.layers:
            self.columns.append(_Column(f"layer-{layer}", np.int16, target.hidden_size))
        self.top_ids = f"top-{reads.top_k}.ids"
        self.top_log = f"top-{reads.top_k}.log"
        if reads.top_k:
            self.columns.append(_Column(self.top_ids, np.int32, reads.top_k))
            self.columns.append(_Column(self.top_log, np.float16, reads.top_k))
        tokens = [hashlib.sha256(store.tokens[split]).hexdigest() for split in SPLITS]
        key = digest_of_value([FORMAT, target.digest(), tokens, store.length])
        self.folder = folder / key[:16]
        self._check_room(folder, most_bytes)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files = {(split, column.name): self._open(split, column) for split in SPLITS for column in self.columns}

    def states(self, batch: Batch) -> TargetStates:
        """The states that `reads` names, for windows of the store's grid, as Target.run returns them.

        Returns:
            Final states and exits [rows, hidden] in the target's dtype and on the batch's device,
            and top-k targets.
        """
        windows = list(batch.windows)
        files = {column.name: self._files[batch.split, column.name] for column in self.columns}
        missing = [at for at, window in enumerate(windows) if not all(file.written[window] for file in files.values())]
        if missing:
            self._compute(batch.chosen(missing))
        read = {
            column.name: self._as_states(files[column.name].values[windows], column, batch) for column in self.columns
        }
        target, reads = self.target, self.reads
        states = TargetStates(final=read["final"])
        with torch.no_grad():
            states.layers = {layer: read[f"layer-{layer}"] for layer in reads.exits}
            states.exits = {layer: target.norm(hidden) for layer, hidden in states.layers.items()}
        if reads.stem:
            states.stem = target.stem_call(batch, read[f"layer-{target.num_layers - 1}"])
        if reads.top_k:
            states.top_ids = read[self.top_ids]
            states.top_log_probs = read[self.top_log]
        return states

    def _as_states(self, copied: np.ndarray, column: _Column, batch: Batch) -> torch.Tensor:
        values = torch.from_numpy(copied).flatten(0, 1)
        device = batch.input_ids.device
        if column.dtype is np.int16:
            return values.view(torch.bfloat16).to(device, self.target.dtype)
        dtype = torch.float32 if values.is_floating_point() else torch.int64
        return values.to(device, dtype)

    @torch.no_grad()
    def _compute(self, batch: Batch) -> None:
        """Run the target over windows and write them to all files."""
        states = read_target(self.target, batch, Reads(exits=self.layers, top_k=self.reads.top_k))
        tensors = {"final": states.final}
        for layer, hidden in states.layers.items():
            tensors[f"layer-{layer}"] = hidden
        if states.top_ids is not None and states.top_log_probs is not None:
            tensors[self.top_ids] = states.top_ids
            tensors[self.top_log] = states.top_log_probs
        windows = list(batch.windows)
        for column in self.columns:
            file = self._files[batch.split, column.name]
            rows = tensors[column.name].cpu()
            if column.dtype is np.int16:
                rows = rows.to(torch.bfloat16).view(torch.int16)
            file.values[windows] = rows.numpy().reshape(len(windows), *file.values.shape[1:])
            file.written[windows] = True  # last, as a kill may come between

    def _open(self, split: str, column: _Column) -> _File:
        windows = self.store.num_windows(split)
        path = self.folder / f"{split}.{column.name}"
        return _File(
            _mapped(path, column.dtype, (windows, self.store.length, column.width)),
            _mapped(path.with_name(f"{path.name}.written"), np.bool_, (windows,)),
        )

    def _check_room(self, folder: Path, most_bytes: int) -> None:
        """Refuse a cache that would not fit, before the first window is computed."""
        windows = sum(self.store.num_windows(split) for split in SPLITS)
        row = sum(column.width * np.dtype(column.dtype).itemsize for column in self.columns)
        needed = windows * self.store.length * row
        others = sum(
            path.stat().st_size for path in folder.glob("*/*") if path.is_file() and path.parent != self.folder
        )
        if needed + others > most_bytes:
            raise TrainingError(
                f"--states-cache needs {needed / GB:.2f} GB besides the {others / GB:.2f} GB of other "
                f"data there, but --states-cache-gb allows {most_bytes / GB:g}; raise it, or delete "
                f"old folders in {place(folder)}"
            )
        there = next(path for path in (folder, *folder.resolve().parents) if path.is_dir())
        free = shutil.disk_usage(there).free
        if needed > free and not self.folder.exists():
            raise TrainingError(
                f"--states-cache needs {needed / GB:.2f} GB, but the disk of {place(folder)} has "
                f"{free / GB:.2f} GB free; give another folder, or leave the cache out"
            )


def _mapped(path: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> np.memmap:
    """Map a file of that shape for reading and writing; a new one is of zeros, sparse on most disks."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    with path.open("ab") as file:
        file.truncate(size)
    return np.memmap(path, dtype, "r+", shape=shape)

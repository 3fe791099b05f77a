# SPDX-License-Identifier: Apache-2.0
"""A cache of the frozen target's states on disk, computed when a window is first read and reused afterwards.

A recipe names in `reads` what it learns from, and gets it from `Recipe.states(batch)`, cached or not.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.files import digest_of_value
from vllm_ppd.heads.quote import place
from vllm_ppd.heads.training.target import Target, TargetStates
from vllm_ppd.heads.training.tokens import SPLITS, Batch, TokenStore
from vllm_ppd.kernels.unembedding_loss import top_log_probs

FORMAT = 2  # incremented when the same target and tokens give different files
GB = 1e9


class Reads(NamedTuple):
    """What a kind of heads reads of the target in addition to the final states."""

    exits: tuple[int, ...] = ()  # layer counts after which the normed state is needed
    stem: bool = False  # whether the last decoder layer's arguments are needed
    top_k: int = 0  # number of likeliest next tokens whose log-probabilities are distilled


class _Column(NamedTuple):
    """The values per token in a file of the cache."""

    name: str
    dtype: type[np.generic]
    width: int


def read_target(target: Target, batch: Batch, reads: Reads, cache: StatesCache | None = None) -> TargetStates:
    """The requested states of the target (TargetStates), from a cache of these reads or by one forward pass."""
    if cache is not None and batch.windows:
        return cache.states(batch)
    states = target.run(batch, reads.exits, reads.stem)
    if reads.top_k:
        states.top_ids, states.top_log_probs = top_log_probs(states.final, reads.top_k, target.unembedding, target.bias)
    return states


class StatesCache:
    """Memory-mapped files, one for each tensor and split, in a folder named after target, first tokens and length.

    Kinds of heads share a folder: each reads the files that it needs, and a window that a file lacks is computed by one
    pass of the target. States after a layer are stored before the norm, in bfloat16, and the final ones after it.
    Every window of a file has a checksum of its states and tokens; one that does not match is computed again. So data
    with the same beginning shares a folder, and adding files at the end keeps the states of all earlier windows.

    Args:
        folder: of all caches.
        target: frozen.
        store: the tokens.
        reads: the states to cache.
        most_bytes: the most bytes in `folder`.

    Raises:
        TrainingError: if that is too little, the disk lacks room, or the target is not frozen.
    """

    def __init__(self, folder: Path, target: Target, store: TokenStore, reads: Reads, most_bytes: int) -> None:
        if target.trainable:
            raise TrainingError("--states-cache needs a frozen target, but --recipe full trains it; omit one of them")
        self.target, self.store, self.reads = target, store, reads
        self.layers = tuple(sorted({*reads.exits, *((target.num_layers - 1,) if reads.stem else ())}))
        names = ["final", *(f"layer-{layer}" for layer in self.layers)]
        self.columns = [_Column(name, np.int16, target.hidden_size) for name in names]
        self.top_ids, self.top_log = f"top-{reads.top_k}.ids", f"top-{reads.top_k}.log"
        if reads.top_k:
            self.columns += [
                _Column(self.top_ids, np.int32, reads.top_k), _Column(self.top_log, np.float16, reads.top_k)
            ]  # fmt: skip
        first = zlib.crc32(store.tokens["train"]["id"][: store.length].tobytes())
        facts = {"format": FORMAT, "target": target.digest(), "tokens": first, "length": store.length}
        self.folder = folder / digest_of_value(facts)[:16]
        self._check_room(folder, most_bytes)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files = {(split, column.name): self._open(split, column) for split in SPLITS for column in self.columns}
        self._has_warned = False

    def states(self, batch: Batch) -> TargetStates:
        """The states that `reads` names, for windows of the store's grid, as Target.run returns them.

        Returns:
            Final states and exits [rows, hidden] in the target's dtype and on the batch's device, and top-k targets.
        """
        # Check copies: another run whose data begins alike may write the same window meanwhile.
        copies = {column.name: self._files[batch.split, column.name][0][list(batch.windows)] for column in self.columns}
        tokens = _token_sums(batch)
        missing = [at for at in range(len(batch.windows)) if not self._is_whole(batch, at, copies, tokens[at])]
        if missing:
            for name, values in self._compute(batch.chosen(missing), [tokens[at] for at in missing]).items():
                copies[name][missing] = values
        read = {column.name: self._as_states(copies[column.name], column, batch) for column in self.columns}
        target, reads = self.target, self.reads
        states = TargetStates(final=read["final"])
        with torch.no_grad():
            states.layers = {layer: read[f"layer-{layer}"] for layer in reads.exits}
            states.exits = {layer: target.norm(hidden) for layer, hidden in states.layers.items()}
        if reads.stem:
            states.stem = target.stem_call(batch, read[f"layer-{target.num_layers - 1}"])
        if reads.top_k:
            states.top_ids, states.top_log_probs = read[self.top_ids], read[self.top_log]
        return states

    def _as_states(self, copied: np.ndarray, column: _Column, batch: Batch) -> torch.Tensor:
        values = torch.from_numpy(copied).flatten(0, 1)
        device = batch.input_ids.device
        if column.dtype is np.int16:
            return values.view(torch.bfloat16).to(device, self.target.dtype)
        return values.to(device, torch.float32 if values.is_floating_point() else torch.int64)

    @torch.no_grad()
    def _compute(self, batch: Batch, tokens: list[int]) -> dict[str, np.ndarray]:
        """Run the target over windows and write them to all files, values before checksums.

        Returns:
            The written values by file: [windows, length, width].
        """
        states = read_target(self.target, batch, Reads(exits=self.layers, top_k=self.reads.top_k))
        tensors = {"final": states.final} | {f"layer-{n}": hidden for n, hidden in states.layers.items()}
        if states.top_ids is not None and states.top_log_probs is not None:
            tensors |= {self.top_ids: states.top_ids, self.top_log: states.top_log_probs}
        written = {}
        for column in self.columns:
            values, sums = self._files[batch.split, column.name]
            rows = tensors[column.name].cpu()
            rows = rows.to(torch.bfloat16).view(torch.int16) if column.dtype is np.int16 else rows
            written[column.name] = rows.numpy().astype(column.dtype).reshape(len(batch.windows), *values.shape[1:])
            for number, window, of_tokens in zip(batch.windows, written[column.name], tokens, strict=True):
                sums[number] = 0
                values[number] = window
                sums[number] = _checksum(window, of_tokens)
        return written

    def _is_whole(self, batch: Batch, at: int, copies: dict[str, np.ndarray], tokens: int) -> bool:
        """Whether the copies from all files hold a window of the batch, undamaged."""
        for column in self.columns:
            stored = self._files[batch.split, column.name][1][batch.windows[at]]
            if not stored:
                return False
            if stored != _checksum(copies[column.name][at], tokens):
                if not self._has_warned:
                    where = place(self.folder / f"{batch.split}.{column.name}")
                    tqdm.write(
                        f"vllm-ppd: {where} is damaged or from other data; computing its windows again", file=sys.stderr
                    )
                self._has_warned = True
                return False
        return True

    def _open(self, split: str, column: _Column) -> tuple[np.memmap, np.memmap]:
        """(values [windows, length, width], checksums [windows], 0 where a window is missing)."""
        windows = self.store.num_windows(split)
        path = self.folder / f"{split}.{column.name}"
        values = _mapped(path, column.dtype, (windows, self.store.length, column.width))
        return values, _mapped(path.with_name(path.name + ".crc"), np.uint64, (windows,))

    def _check_room(self, folder: Path, most_bytes: int) -> None:
        """Refuse a cache that would not fit, before the first window is computed."""
        windows = sum(self.store.num_windows(split) for split in SPLITS)
        row = sum(column.width * np.dtype(column.dtype).itemsize for column in self.columns)
        needed = windows * (self.store.length * row + 8 * len(self.columns))
        ours = {f"{split}.{column.name}" for split in SPLITS for column in self.columns}
        others = written = 0
        for path in folder.rglob("*") if folder.is_dir() else ():
            if path.is_file():
                is_ours = path.parent == self.folder and path.name.removesuffix(".crc") in ours
                others += 0 if is_ours else path.stat().st_size
                written += 512 * path.stat().st_blocks if is_ours else 0
        if needed + others > most_bytes:
            raise TrainingError(
                f"--states-cache needs {needed / GB:.2f} GB besides the {others / GB:.2f} GB it holds, but "
                f"--states-cache-gb allows {most_bytes / GB:g}; raise it, or delete old folders in {place(folder)}"
            )
        there = next(path for path in (folder, *folder.resolve().parents) if path.is_dir())
        free = shutil.disk_usage(there).free
        if needed - written > free:
            raise TrainingError(
                f"--states-cache needs {(needed - written) / GB:.2f} GB more, but the disk of {place(folder)} has "
                f"{free / GB:.2f} GB free; give another folder, or leave the cache out"
            )


def _token_sums(batch: Batch) -> list[int]:
    """CRC-32 of the tokens and positions of each window."""
    rows = torch.stack([batch.input_ids, batch.position_ids], dim=1).cpu().numpy()
    return [zlib.crc32(row.tobytes()) for row in rows]


def _checksum(window: np.ndarray, tokens: int) -> int:
    """CRC-32 of the tokens and the values, plus 1, so that 0 means none."""
    return zlib.crc32(np.ascontiguousarray(window).view(np.uint8).data, tokens) + 1


def _mapped(path: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> np.memmap:
    """Map a file of at least that shape for reading and writing; new parts are zeros, sparse on most disks."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another run may enlarge it
        file.truncate(max(size, file.seek(0, os.SEEK_END)))
    return np.memmap(path, dtype, "r+", shape=shape)

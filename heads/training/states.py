# SPDX-License-Identifier: Apache-2.0
"""States of the frozen target on disk: computed when a window is first read, and read by every later epoch and run.

A recipe says in `reads` what it learns from, and asks `Recipe.states(batch)` for it, cached or not.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.io import write_text
from vllm_ppd.heads.quote import place
from vllm_ppd.heads.training.target import Target, TargetStates
from vllm_ppd.heads.training.tokens import SPLITS, Batch, TokenStore
from vllm_ppd.kernels.unembedding_loss import top_log_probs

FORMAT = 1  # raised when the same target and tokens would give other files
DESCRIPTION = "states.json"
GB = 1e9


class Reads(NamedTuple):
    """What a kind of heads reads of the target beside the final states."""

    exits: tuple[int, ...] = ()  # layer counts after which the normed state is wanted
    stem: bool = False  # the call of the last decoder layer
    top_k: int = 0  # likeliest next tokens and their log-probabilities, as targets of distillation


class _Part(NamedTuple):
    """What one file holds of each token."""

    name: str
    dtype: type[np.generic]
    width: int

    @property
    def token_bytes(self) -> int:
        return self.width * np.dtype(self.dtype).itemsize


def read_target(target: Target, batch: Batch, reads: Reads, cache: StatesCache | None = None) -> TargetStates:
    """What is asked of the target (TargetStates): from a cache of these reads where there is one, else by one pass."""
    if cache is not None and batch.windows:
        return cache.states(batch)
    states = target.run(batch, reads.exits, reads.stem)
    if reads.top_k:
        states.top_ids, states.top_log_probs = top_log_probs(states.final, reads.top_k, target.unembedding, target.bias)
    return states


class StatesCache:
    """Memory-mapped files, one for each tensor and split, in a folder named after target, tokens and window length.

    Kinds of heads share a folder: each reads the files it needs, and a window that a file lacks is computed with one
    pass of the target. States after a layer are kept as they are, before the norm, in bfloat16; the final ones normed.
    Every window of a file has a checksum: one that does not fit is computed again.

    Args:
        folder: of all caches.
        target: frozen.
        store: the tokens.
        reads: what is read.
        layers: further layer counts to keep, for other kinds of heads that are trained later.
        most_bytes: what `folder` may hold.

    Raises:
        TrainingError: if that is too little, the disk lacks room, or the target is not frozen.
    """

    def __init__(
        self, folder: Path, target: Target, store: TokenStore, reads: Reads, layers: Sequence[int], most_bytes: int
    ) -> None:
        if target.trainable:
            raise TrainingError("--states-cache keeps states of a frozen target, and --recipe full trains it: omit one")
        outside = [layer for layer in layers if not 1 <= layer < target.num_layers]
        if outside:
            raise TrainingError(f"--states-layers {outside[0]} is outside 1..{target.num_layers - 1}")
        self.target, self.store, self.reads = target, store, reads
        learned = {*reads.exits, *((target.num_layers - 1,) if reads.stem else ())}
        self.layers = tuple(sorted({*learned, *layers}))
        size = target.hidden_size
        self.parts = [_Part("final", np.int16, size), *(_Part(f"layer-{n}", np.int16, size) for n in self.layers)]
        if reads.top_k:
            name = f"top-{reads.top_k}"
            self.parts += [_Part(f"{name}.ids", np.int32, reads.top_k), _Part(f"{name}.log", np.float16, reads.top_k)]
        kept_alone = {f"layer-{n}" for n in self.layers if n not in learned}
        self.read_parts = [part for part in self.parts if part.name not in kept_alone]
        facts = {
            "format": FORMAT, "target": target.digest(), "tokens": store.manifest.digest, "length": store.length,
        }  # fmt: skip
        self.folder = folder / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        self._make_room(folder, most_bytes)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / DESCRIPTION, json.dumps({**facts, "model": target.name}, indent=1) + "\n")
        self._files = {(split, part.name): self._open(split, part) for split in SPLITS for part in self.parts}
        self._told = False

    def states(self, batch: Batch) -> TargetStates:
        """What `reads` names, of windows of the store's grid, as Target.run gives it.

        Returns:
            Final states and exits [rows, hidden] in the target's dtype and on the batch's device, and top-k targets.
        """
        missing = [i for i, number in enumerate(batch.windows) if not self._is_whole(batch.split, number)]
        if missing:
            self._compute(batch.part(missing))
        read = {part.name: self._read(batch, part) for part in self.read_parts}
        target, reads = self.target, self.reads
        found = TargetStates(final=read["final"])
        with torch.no_grad():
            found.layers = {layer: read[f"layer-{layer}"] for layer in reads.exits}
            found.exits = {layer: target.norm(hidden) for layer, hidden in found.layers.items()}
        if reads.stem:
            found.stem = target.stem_call(batch, read[f"layer-{target.num_layers - 1}"])
        if reads.top_k:
            found.top_ids, found.top_log_probs = read[f"top-{reads.top_k}.ids"], read[f"top-{reads.top_k}.log"]
        return found

    def _read(self, batch: Batch, part: _Part) -> torch.Tensor:
        values = torch.from_numpy(self._files[batch.split, part.name][0][list(batch.windows)]).flatten(0, 1)
        device = batch.input_ids.device
        if part.dtype is np.int16:
            return values.view(torch.bfloat16).to(device, self.target.dtype)
        return values.to(device, torch.float32 if values.is_floating_point() else torch.int64)

    @torch.no_grad()
    def _compute(self, batch: Batch) -> None:
        """Run the target over windows and write all files' parts of them, values before checksums."""
        states = read_target(self.target, batch, Reads(exits=self.layers, top_k=self.reads.top_k))
        tensors = {"final": states.final} | {f"layer-{n}": hidden for n, hidden in states.layers.items()}
        if states.top_ids is not None and states.top_log_probs is not None:
            tensors |= {
                f"top-{self.reads.top_k}.ids": states.top_ids,
                f"top-{self.reads.top_k}.log": states.top_log_probs,
            }
        for part in self.parts:
            values, sums = self._files[batch.split, part.name]
            rows = tensors[part.name].cpu()
            rows = rows.to(torch.bfloat16).view(torch.int16) if part.dtype is np.int16 else rows
            written = rows.numpy().astype(part.dtype).reshape(len(batch.windows), *values.shape[1:])
            for number, window in zip(batch.windows, written, strict=True):
                sums[number] = 0
                values[number] = window
                sums[number] = _checksum(window)

    def _is_whole(self, split: str, number: int) -> bool:
        """Whether all files have the window, undamaged."""
        for part in self.parts:
            values, sums = self._files[split, part.name]
            if not sums[number]:
                return False
            if sums[number] != _checksum(values[number]):
                if not self._told:
                    where = place(self.folder / f"{split}.{part.name}")
                    tqdm.write(f"vllm-ppd: {where} is damaged; computing its windows again", file=sys.stderr)
                self._told = True
                return False
        return True

    def _open(self, split: str, part: _Part) -> tuple[np.memmap, np.memmap]:
        """(values [windows, length, width], checksums [windows], 0 where a window is missing)."""
        windows = self.store.num_windows(split)
        path = self.folder / f"{split}.{part.name}"
        values = _mapped(path, part.dtype, (windows, self.store.length, part.width))
        return values, _mapped(path.with_name(path.name + ".crc"), np.uint64, (windows,))

    def _make_room(self, folder: Path, most_bytes: int) -> None:
        """Refuse what would not fit, before the first window is computed."""
        windows = sum(self.store.num_windows(split) for split in SPLITS)
        needed = windows * (self.store.length * sum(part.token_bytes for part in self.parts) + 8 * len(self.parts))
        ours = {f"{split}.{part.name}" for split in SPLITS for part in self.parts}
        others = written = 0
        for path in folder.rglob("*") if folder.is_dir() else ():
            if path.is_file():
                own = path.parent == self.folder and path.name.removesuffix(".crc") in ours
                others += 0 if own else path.stat().st_size
                written += 512 * path.stat().st_blocks if own else 0
        if needed + others > most_bytes:
            raise TrainingError(
                f"--states-cache needs {needed / GB:.2f} GB beside the {others / GB:.2f} GB it holds, and "
                f"--states-cache-gb allows {most_bytes / GB:g}: raise it, delete old folders in {place(folder)}, "
                "or name fewer layers"
            )
        there = next(path for path in (folder, *folder.resolve().parents) if path.is_dir())
        free = shutil.disk_usage(there).free
        if needed - written > free:
            raise TrainingError(
                f"--states-cache needs {(needed - written) / GB:.2f} GB more, and the disk of {place(folder)} has "
                f"{free / GB:.2f} GB free: give another folder, or leave the cache out"
            )


def _checksum(window: np.ndarray) -> int:
    """CRC-32 of the values, and 1 more, so that 0 is none."""
    return zlib.crc32(np.ascontiguousarray(window).view(np.uint8).data) + 1


def _mapped(path: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> np.memmap:
    """A file of that shape to read and write; what it lacks is zeros, which take no room on most disks."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    with path.open("ab") as file:
        file.truncate(size)
    return np.memmap(path, dtype, "r+", shape=shape)

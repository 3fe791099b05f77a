# SPDX-License-Identifier: Apache-2.0
"""A cache of the frozen target's states on disk, computed when a window is first read
and reused afterwards.

A recipe names in `reads` what it learns from, and gets it from `Recipe.states(batch)`,
cached or not.
"""

import hashlib
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.files import digest_of_value, write_tensors
from vllm_ppd.heads.training.target import Target, TargetStates
from vllm_ppd.heads.training.tokens import SPLITS, Batch, TokenStore

FORMAT = 3  # incremented when the same target and tokens give different files
GIB = 1 << 30
FILLED_AT_ONCE = 64  # windows


class Reads(NamedTuple):
    """What a kind of heads reads of the target in addition to the final states."""

    exits: tuple[
        int, ...
    ] = ()  # layer counts after which the normed state is needed
    stem: bool = False  # whether the last decoder layer's arguments are needed
    # Number of likeliest next tokens whose log-probabilities are distilled
    top_k: int = 0


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
        most_bytes: the most bytes of these states.

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
        self.store = store
        self.reads = reads
        before_stem = {target.num_layers - 1} if reads.stem else set()
        self.layers = tuple(sorted(before_stem.union(reads.exits)))
        self.names = {layer: f"layer-{layer}" for layer in self.layers}
        self.top = [f"top-{reads.top_k}.ids", f"top-{reads.top_k}.log"]
        # Tensors of a file
        self.needed = {"final", *self.names.values()}
        if reads.top_k:
            self.needed.update(self.top)
        tokens = [
            hashlib.sha256(store.tokens[split].data).hexdigest()
            for split in SPLITS
        ]
        key = digest_of_value([FORMAT, target.digest(), tokens, store.length])
        self.folder = folder / key[:16]
        self._check_room(folder, most_bytes)

    def states(self, batch: Batch) -> TargetStates:
        """The states that `reads` names, for windows of the store's grid, as Target.run
        returns them.

        Returns:
            Final states and exits [rows, hidden] in the target's dtype and on the
            batch's device, and top-k targets.
        """
        target = self.target
        reads = self.reads
        names = self.names
        top_ids, top_log = self.top
        needed = self.needed
        paths = [self._path(batch.split, window) for window in batch.windows]
        stored = [load_file(path) if path.exists() else {} for path in paths]
        missing = [
            at for at, tensors in enumerate(stored) if needed - tensors.keys()
        ]
        if missing:
            windows = [batch.windows[at] for at in missing]
            some = self.store.batch(batch.split, windows).to(
                batch.input_ids.device
            )
            computed = target.run(some, self.layers, top_k=reads.top_k)
            rows = {"final": computed.final.bfloat16()}
            for layer, name in names.items():
                rows[name] = computed.layers[layer].bfloat16()
            if (
                computed.top_ids is not None
                and computed.top_log_probs is not None
            ):
                rows[top_ids] = computed.top_ids.int()
                rows[top_log] = computed.top_log_probs.half()
            for name, values in rows.items():
                parts = values.detach().cpu().chunk(len(missing))
                for at, part in zip(missing, parts, strict=True):
                    stored[at][name] = part.contiguous()
            for at in missing:
                write_tensors(paths[at], stored[at])

        def joined(name: str, dtype: torch.dtype) -> torch.Tensor:
            # Converted first: autocast to bfloat16 refuses to join float16.
            values = torch.cat([tensors[name].to(dtype) for tensors in stored])
            return values.to(batch.input_ids.device)

        final = joined("final", target.dtype)
        layers = {
            layer: joined(name, target.dtype) for layer, name in names.items()
        }
        with torch.no_grad():
            states = target.states_of(batch, final, layers, reads.stem)
        if reads.top_k:
            states.top_ids = joined(top_ids, torch.int64)
            states.top_log_probs = joined(top_log, torch.float32)
        return states

    def fill(self) -> None:
        """Compute the states that are not cached."""
        for split in SPLITS:
            lacking = [
                window
                for window in range(self.store.num_windows(split))
                if not self._is_cached(self._path(split, window))
            ]
            for start in range(0, len(lacking), FILLED_AT_ONCE):
                some = lacking[start : start + FILLED_AT_ONCE]
                self.states(self.store.batch(split, some))

    def _is_cached(self, path: Path) -> bool:
        if not path.exists():
            return False
        with safe_open(path, framework="pt") as file:
            return self.needed <= set(file.keys())

    def _path(self, split: str, window: int) -> Path:
        return self.folder / f"{split}-{window}.safetensors"

    def _check_room(self, folder: Path, most_bytes: int) -> None:
        """Make the folder, or refuse a cache that would not fit."""
        windows = sum(self.store.num_windows(split) for split in SPLITS)
        states = 2 * self.target.hidden_size * (1 + len(self.layers))
        needed = windows * self.store.length * (states + 6 * self.reads.top_k)
        if needed > most_bytes:
            raise TrainingError(
                f"--states-cache needs {needed / GIB:.2f} GiB, but --states-cache-gib "
                f"allows {most_bytes / GIB:g}; raise it"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if needed > free and not any(self.folder.iterdir()):
            raise TrainingError(
                f"--states-cache needs {needed / GIB:.2f} GiB, but the disk of "
                f"{folder} has {free / GIB:.2f} GiB free; use another folder, "
                "or do not cache"
            )

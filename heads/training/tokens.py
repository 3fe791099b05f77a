# SPDX-License-Identifier: Apache-2.0
"""The corpus as token ids on disk, and packed windows of it: memory does not grow with the corpus."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.training import TrainingError
from vllm_ppd.heads.training.token_files import NAME, Manifest, intact_manifest, write_manifest

SPLITS = ("train", "held_out")
FILES = tuple(f"{split}.{kind}" for split in SPLITS for kind in ("ids", "starts"))
FORMAT = 2  # of the tokens: raised when the same data would be tokenised otherwise


@dataclass
class Batch:
    """Packed windows. Positions restart at every document, and attention does not cross documents."""

    input_ids: torch.Tensor  # [windows, length] int64
    position_ids: torch.Tensor  # [windows, length] int64
    split: str = ""  # of the store that they are from
    windows: tuple[int, ...] = ()  # their numbers in it; empty for windows that are not on its grid

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    def ahead(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The n tokens that follow each token.

        Returns:
            (tokens [windows * length, n]; whether all n are in the token's document and window [windows * length]).
        """
        windows, length = self.input_ids.shape
        offsets = torch.arange(length, device=self.input_ids.device)[:, None] + torch.arange(1, n + 1).to(
            self.input_ids.device
        )
        inside = offsets[:, -1] < length
        tokens = self.input_ids[:, offsets.clamp(max=length - 1)]
        last = self.position_ids[:, offsets[:, -1].clamp(max=length - 1)]
        same = inside & (last == self.position_ids + n)
        return tokens.reshape(windows * length, n), same.reshape(-1)

    def to(self, device: torch.device) -> Batch:
        return replace(self, input_ids=self.input_ids.to(device), position_ids=self.position_ids.to(device))

    def part(self, chosen: Sequence[int]) -> Batch:
        """Some of its windows, by place."""
        index = torch.as_tensor(chosen, device=self.input_ids.device)
        windows = tuple(self.windows[i] for i in chosen) if self.windows else ()
        return replace(self, input_ids=self.input_ids[index], position_ids=self.position_ids[index], windows=windows)

    @staticmethod
    def concatenated(parts: Sequence[Batch]) -> Batch:
        """The windows of several batches of one split."""
        on_grid = all(part.windows for part in parts)
        return Batch(
            torch.cat([part.input_ids for part in parts]),
            torch.cat([part.position_ids for part in parts]),
            parts[0].split,
            tuple(number for part in parts for number in part.windows) if on_grid else (),
        )


class TokenStore:
    """Token ids of all documents in two memory-mapped files, training and held out, made once for a folder.

    Args:
        folder: where the files are; made there if they are missing, damaged or belong to other data.
        data: files and folders of documents.
        tokenizer: the target's.
        vocab_size: ids must be below it.
        held_out: share of the documents that is never trained on, chosen by a hash of their number.
        length: tokens a window.

    Raises:
        TrainingError: if the data cannot be read, is empty or too short, or the tokenizer does not fit the model.
    """

    def __init__(
        self, folder: Path, data: Sequence[str | Path], tokenizer: Any, vocab_size: int, held_out: float, length: int
    ) -> None:
        self.folder, self.length = folder, length
        documents = Documents(data, lambda: tokenizer)
        key = _key(documents, tokenizer, vocab_size, held_out)
        manifest = intact_manifest(folder, key, FILES)
        if manifest is None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / NAME).unlink(missing_ok=True)
            self._write(documents, tokenizer, vocab_size, held_out)
            manifest = write_manifest(folder, key, FILES, documents.count, dict(documents.skipped))
        self.manifest: Manifest = manifest
        self.tokens = {split: np.memmap(folder / f"{split}.ids", np.uint32, "r") for split in self._present()}
        self.starts = {split: np.memmap(folder / f"{split}.starts", np.int64, "r") for split in self._present()}
        for split in SPLITS:
            count = len(self.tokens.get(split, ()))
            if count < length + 1:
                raise TrainingError(
                    f"the data holds {count} {split.replace('_', '-')} tokens, and a window takes {length}: "
                    "give more data, or a smaller --sequence-length"
                )

    def num_windows(self, split: str = "train") -> int:
        return (len(self.tokens[split]) - 1) // self.length

    def batch(self, split: str, windows: Sequence[int], shift: int = 0) -> Batch:
        """Windows of a split by number; shift moves all of them by so many tokens (around the end)."""
        tokens, starts = self.tokens[split], self.starts[split]
        ids, positions = [], []
        last = len(tokens) - self.length
        for window in windows:
            begin = (window * self.length + shift) % (last + 1)
            where = np.arange(begin, begin + self.length)
            owner = starts[np.searchsorted(starts, where, side="right") - 1]
            ids.append(tokens[begin : begin + self.length].astype(np.int64))
            positions.append(where - np.maximum(owner, begin))
        on_grid = () if shift else tuple(windows)
        return Batch(torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(positions)), split, on_grid)

    def token_counts(self, vocab_size: int, split: str = "train") -> torch.Tensor:
        """How often each token occurs: [vocabulary] int32."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for ids in self.documents(split):
            counts += np.bincount(ids, minlength=vocab_size)
        return torch.from_numpy(counts.clip(max=2**31 - 1).astype(np.int32))

    def documents(self, split: str = "train") -> Iterator[np.ndarray]:
        """The token ids of every document, one after the other."""
        tokens, starts = self.tokens[split], self.starts[split]
        for index, begin in enumerate(starts):
            end = starts[index + 1] if index + 1 < len(starts) else len(tokens)
            yield np.asarray(tokens[begin:end])

    def _present(self) -> list[str]:
        return [split for split in SPLITS if (self.folder / f"{split}.ids").stat().st_size]

    def _write(self, documents: Documents, tokenizer: Any, vocab_size: int, held_out: float) -> None:
        end = tokenizer.eos_token_id
        written = dict.fromkeys(SPLITS, 0)
        with ExitStack() as stack:
            ids_of = {split: stack.enter_context((self.folder / f"{split}.ids").open("wb")) for split in SPLITS}
            starts_of = {split: stack.enter_context((self.folder / f"{split}.starts").open("wb")) for split in SPLITS}
            progress = tqdm(documents.token_ids(), desc="tokenising", unit=" documents", mininterval=1)
            for number, ids in enumerate(progress):
                row = np.array(ids if end is None or ids[-1:] == [end] else [*ids, end], dtype=np.int64)
                if len(row) and int(row.max()) >= vocab_size:
                    raise TrainingError(
                        f"the tokenizer makes token id {int(row.max())}, and the model knows {vocab_size} tokens: "
                        "this is not the model's tokenizer"
                    )
                split = "held_out" if _is_held_out(number, held_out) else "train"
                starts_of[split].write(np.int64(written[split]).tobytes())
                ids_of[split].write(row.astype(np.uint32).tobytes())
                written[split] += len(row)
        if not sum(written.values()):
            skips = f"; {documents.skips()}" if documents.skipped else ""
            raise TrainingError(
                f"the data is empty ({len(documents.files)} files, no text{skips}); give .jsonl or text files with text"
            )
        if written["held_out"] <= self.length:
            self._hold_out_tail(written)

    def _hold_out_tail(self, written: dict[str, int]) -> None:
        """Too little was held out whole: take the training tokens' tail as well."""
        ids, starts = self.folder / "train.ids", self.folder / "train.starts"
        cut = written["train"] - min(written["train"] // 2, self.length + 1)
        tail = np.fromfile(ids, np.uint32, offset=4 * cut)
        with (self.folder / "held_out.ids").open("ab") as held, (self.folder / "held_out.starts").open("ab") as begins:
            begins.write(np.int64(written["held_out"]).tobytes())
            held.write(tail.tobytes())
        kept = int(np.searchsorted(np.fromfile(starts, np.int64), cut))
        os.truncate(ids, 4 * cut)
        os.truncate(starts, 8 * kept)


def _is_held_out(number: int, share: float) -> bool:
    """Whole documents, chosen by a hash of their number."""
    digest = hashlib.sha256(str(number).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < share


def _key(documents: Documents, tokenizer: Any, vocab_size: int, held_out: float) -> str:
    """A hash of what the tokens are made of: the files as they are named, their sizes and times, and the tokenizer."""
    stamp = [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in documents.files]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else len(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(json.dumps([FORMAT, stamp, held_out, vocab_size, words, template]).encode()).hexdigest()

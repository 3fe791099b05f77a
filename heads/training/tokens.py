# SPDX-License-Identifier: Apache-2.0
"""The corpus as token ids on disk, and packed windows of it: memory does not grow with the corpus."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from tqdm import tqdm

from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.data.prompts import check_vocabulary
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.files import write_text
from vllm_ppd.heads.quote import place
from vllm_ppd.heads.training.digests import FileDigest, digest_of, digest_of_value, first_damaged

SPLITS = ("train", "held_out")
FILES = tuple(f"{split}.{kind}" for split in SPLITS for kind in ("ids", "starts", "counted"))
NAME = "tokens.json"  # which data the token files beside it are of, and what they hash to
FORMAT = 3  # of the tokens: raised when the same data would be tokenised otherwise


@dataclass
class Batch:
    """Packed windows. Positions restart at every document, and attention does not cross documents."""

    input_ids: torch.Tensor  # [windows, length] int64
    position_ids: torch.Tensor  # [windows, length] int64
    split: str = ""  # of the store that they are from
    windows: tuple[int, ...] = ()  # their numbers in it; empty for windows that are not on its grid
    counted: torch.Tensor | None = None  # [windows, length] bool: tokens whose prediction is in the loss; None: all

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    def ahead(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The n tokens that follow each token.

        Returns:
            (tokens [windows * length, n]; whether all n are in the token's document and window and count in the loss
            [windows * length]).
        """
        windows, length = self.input_ids.shape
        device = self.input_ids.device
        offsets = torch.arange(length, device=device)[:, None] + torch.arange(1, n + 1, device=device)
        inside = offsets[:, -1] < length
        tokens = self.input_ids[:, offsets.clamp(max=length - 1)]
        last = self.position_ids[:, offsets[:, -1].clamp(max=length - 1)]
        same = inside & (last == self.position_ids + n)
        if self.counted is not None:
            same &= self.counted[:, offsets.clamp(max=length - 1)].all(dim=-1)
        return tokens.reshape(windows * length, n), same.reshape(-1)

    def to(self, device: torch.device) -> Batch:
        counted = None if self.counted is None else self.counted.to(device)
        return Batch(self.input_ids.to(device), self.position_ids.to(device), self.split, self.windows, counted)

    def chosen(self, places: Sequence[int]) -> Batch:
        """Some of its windows, by place."""
        index = torch.as_tensor(places, device=self.input_ids.device)
        windows = tuple(self.windows[i] for i in places) if self.windows else ()
        counted = None if self.counted is None else self.counted[index]
        return Batch(self.input_ids[index], self.position_ids[index], self.split, windows, counted)


class Manifest(BaseModel):
    """Written when all token files are whole."""

    model_config = ConfigDict(extra="forbid")

    key: str  # of the data, the split and the tokenizer
    files: dict[str, FileDigest]
    documents: int
    skipped: dict[str, int]  # records by reason

    @property
    def digest(self) -> str:
        """A hash of all tokens: what a run may go on with."""
        lines = "".join(f"{name} {file.sha256}\n" for name, file in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()


class TokenStore:
    """Token ids of all documents in two memory-mapped files, training and held out, made once for a folder.

    Args:
        folder: where the files are; made there if they are missing, damaged or belong to other data.
        data: files and folders of documents.
        tokenizer: the target's.
        vocab_size: ids must be below it.
        held_out: share of the documents that is never trained on, chosen by a hash of their number.
        length: tokens a window.
        train_on_prompts: count the tokens of prompts in the loss, too.

    Raises:
        TrainingError: if the data cannot be read, is empty or too short, or the tokenizer does not fit the model.
    """

    def __init__(
        self, folder: Path, data: Sequence[str | Path], tokenizer: Any, vocab_size: int, held_out: float, length: int,
        train_on_prompts: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self.length = folder, length
        documents = Documents(data, lambda: tokenizer)
        key = _key(documents, tokenizer, vocab_size, held_out, train_on_prompts)
        manifest = _intact_manifest(folder, key)
        if manifest is None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / NAME).unlink(missing_ok=True)
            self._write(documents, tokenizer, vocab_size, held_out, train_on_prompts)
            digests = {name: digest_of(folder / name) for name in FILES}
            manifest = Manifest(key=key, files=digests, documents=documents.count, skipped=dict(documents.skipped))
            write_text(folder / NAME, manifest.model_dump_json())
        self.manifest: Manifest = manifest
        self.tokens = self._mapped("ids", np.uint32)
        self.starts = self._mapped("starts", np.int64)
        self.counted = self._mapped("counted", np.bool_)
        for split in SPLITS:
            count = len(self.tokens.get(split, ()))
            if count < length + 1:
                raise TrainingError(
                    f"the data holds {count} {split.replace('_', '-')} tokens, and a window takes {length}: "
                    "give more data, or a smaller --sequence-length"
                )
            if not self.counted[split][:].any():
                raise TrainingError(
                    f"no {split.replace('_', '-')} token is of a response; give data with responses, or "
                    "--train-on-prompts"
                )

    def num_windows(self, split: str = "train") -> int:
        return (len(self.tokens[split]) - 1) // self.length

    def batch(self, split: str, windows: Sequence[int], shifts: Sequence[int] = ()) -> Batch:
        """Windows of a split.

        Args:
            split: whose windows.
            windows: their numbers.
            shifts: tokens by which each is moved, around the end (none: on the grid).
        """
        tokens, starts = self.tokens[split], self.starts[split]
        ids, positions, counted = [], [], []
        last = len(tokens) - self.length
        for window, shift in itertools.zip_longest(windows, shifts, fillvalue=0):
            begin = (window * self.length + shift) % (last + 1)
            where = np.arange(begin, begin + self.length)
            document_start = starts[np.searchsorted(starts, where, side="right") - 1]
            ids.append(tokens[begin : begin + self.length].astype(np.int64))
            positions.append(where - np.maximum(document_start, begin))
            counted.append(self.counted[split][begin : begin + self.length])
        mask = np.stack(counted)
        return Batch(
            torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(positions)), split,
            () if any(shifts) else tuple(windows), None if mask.all() else torch.from_numpy(mask),
        )  # fmt: skip

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

    def _mapped(self, kind: str, dtype: Any) -> dict[str, np.memmap]:
        """The files of a kind by split, those that hold anything."""
        paths = {split: self.folder / f"{split}.{kind}" for split in SPLITS}
        return {split: np.memmap(path, dtype, "r") for split, path in paths.items() if path.stat().st_size}

    def _write(
        self, documents: Documents, tokenizer: Any, vocab_size: int, held_out: float, train_on_prompts: bool
    ) -> None:
        end = tokenizer.eos_token_id
        written = dict.fromkeys(SPLITS, 0)
        with ExitStack() as stack:
            files = {name: stack.enter_context((self.folder / name).open("wb")) for name in FILES}
            progress = tqdm(documents.tokens(), desc="tokenising", unit=" documents", mininterval=1)
            for number, document in enumerate(progress):
                ids = document.ids or []
                # What was cut off goes on; many chat templates write a line break after the end of a turn.
                has_end = end is None or document.cut_off or end in ids[-2:]
                ids = ids if has_end else [*ids, end]
                check_vocabulary(ids, vocab_size)
                counted = np.ones(len(ids), dtype=np.bool_)
                if not train_on_prompts and document.mask is not None:
                    counted[: len(document.mask)] = document.mask
                split = "held_out" if _is_held_out(number, held_out) else "train"
                files[f"{split}.starts"].write(np.int64(written[split]).tobytes())
                files[f"{split}.ids"].write(np.array(ids, dtype=np.uint32).tobytes())
                files[f"{split}.counted"].write(counted.tobytes())
                written[split] += len(ids)
        if not sum(written.values()):
            skips = f"; {documents.skips()}" if documents.skipped else ""
            raise TrainingError(
                f"the data is empty ({len(documents.files)} files, no text{skips}); give .jsonl or text files with text"
            )
        if written["held_out"] <= self.length:
            self._hold_out_tail(written)

    def _hold_out_tail(self, written: dict[str, int]) -> None:
        """Too little was held out whole: take the training tokens' tail as well."""
        ids, starts, counted = (self.folder / f"train.{kind}" for kind in ("ids", "starts", "counted"))
        cut = written["train"] - min(written["train"] // 2, self.length + 1)
        tail = np.fromfile(ids, np.uint32, offset=4 * cut)
        with (self.folder / "held_out.ids").open("ab") as held, (self.folder / "held_out.starts").open("ab") as begins:
            begins.write(np.int64(written["held_out"]).tobytes())
            held.write(tail.tobytes())
        with (self.folder / "held_out.counted").open("ab") as held:
            held.write(np.fromfile(counted, np.bool_, offset=cut).tobytes())
        documents = int(np.searchsorted(np.fromfile(starts, np.int64), cut))
        os.truncate(ids, 4 * cut)
        os.truncate(counted, cut)
        os.truncate(starts, 8 * documents)


def _is_held_out(number: int, share: float) -> bool:
    """Whole documents, chosen by a hash of their number."""
    digest = hashlib.sha256(str(number).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < share


def _intact_manifest(folder: Path, key: str) -> Manifest | None:
    """The manifest if the token files are whole and of this data; None if they are to be written (again).

    Damage is reported on stderr: the files are made of the data, so that nothing is lost.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except ValidationError:
        damaged = path
    else:
        if manifest.key != key:
            return None
        lacking = [folder / name for name in FILES if name not in manifest.files]
        first = lacking[0] if lacking else first_damaged(folder, manifest.files)
        if first is None:
            return manifest
        damaged = first
    print(f"vllm-ppd: {place(damaged)} is damaged or missing; tokenising the data again", file=sys.stderr)
    return None


def _key(documents: Documents, tokenizer: Any, vocab_size: int, held_out: float, train_on_prompts: bool) -> str:
    """A hash of what the tokens are made of: the files as they are named, their sizes and times, and the tokenizer."""
    stamp = [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in documents.files]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else len(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    facts = [FORMAT, stamp, held_out, vocab_size, words, template, train_on_prompts]
    return digest_of_value(facts)

# SPDX-License-Identifier: Apache-2.0
"""The corpus as token ids on disk, and packed windows of it, so that memory does not
grow with the corpus.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ValidationError
from tqdm import tqdm

from vllm_ppd.heads.data.documents import NO_RESPONSE, Documents
from vllm_ppd.heads.data.prompts import check_vocabulary
from vllm_ppd.heads.data.records import Document
from vllm_ppd.heads.data.special_tokens import control_tokens
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.files import digest_of_value, write_text

SPLITS = ("train", "held_out")
# `counted`: in the loss; `begins`: the first of its document
TOKEN = np.dtype([("id", np.uint32), ("counted", np.bool_), ("begins", np.bool_)])
NAME = "tokens.json"  # describes the data of the token files next to it
SHIFT = 7919  # tokens by which an epoch's windows are shifted from the previous epoch's
LOOKED_AT = 16  # windows at once
FORMAT = 6  # of token files: incremented when the same data is stored differently


@dataclass
class Batch:
    """Packed windows. Positions restart at every document, and attention does not cross
    documents.
    """

    input_ids: torch.Tensor  # [windows, length] int64
    position_ids: torch.Tensor  # [windows, length] int64
    split: str = ""  # split of the store that has them
    windows: tuple[
        int, ...
    ] = ()  # their numbers in the split; empty if not on its grid
    # [windows, length] bool: tokens counted in the loss; None: all
    counted: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    def ahead(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The n tokens that follow each token.

        Returns:
            (tokens [windows * length, n]; whether all n are in the token's document and
            window and count in the loss [windows * length]).
        """
        windows, length = self.input_ids.shape
        device = self.input_ids.device
        steps = torch.arange(1, n + 1, device=device)
        following = torch.arange(length, device=device)[:, None] + steps  # [length, n]
        is_inside = following[:, -1] < length
        following = following.clamp(max=length - 1)
        # Positions restart at every document.
        is_same_document = (
            self.position_ids[:, following[:, -1]] == self.position_ids + n
        )
        valid = is_inside & is_same_document
        if self.counted is not None:
            valid &= self.counted[:, following].all(dim=-1)
        return self.input_ids[:, following].reshape(windows * length, n), valid.reshape(
            -1
        )

    def to(self, device: torch.device) -> Batch:
        counted = None if self.counted is None else self.counted.to(device)
        return Batch(
            self.input_ids.to(device),
            self.position_ids.to(device),
            self.split,
            self.windows,
            counted,
        )

    def chosen(self, places: Sequence[int]) -> Batch:
        """Some of the batch's windows, by index."""
        index = torch.as_tensor(places, device=self.input_ids.device)
        windows = tuple(self.windows[i] for i in places) if self.windows else ()
        counted = None if self.counted is None else self.counted[index]
        return Batch(
            self.input_ids[index],
            self.position_ids[index],
            self.split,
            windows,
            counted,
        )


class Manifest(BaseModel):
    """What a store holds; it is written last, so that it marks the token files as complete."""

    # Hash of the names and times of the data files, the split and the tokenizer
    key: str
    documents: int
    skipped: dict[str, int]  # records by reason


class TokenStore:
    """The tokens of all documents in two memory-mapped files, training and held out,
    made once per folder.

    Args:
        folder: of the files, which are made if they are missing or belong to other
            data.
        data: files and folders of documents.
        tokenizer: the target's.
        vocab_size: ids must be below it.
        held_out: share of the prompts, and of the texts without one, that is never
            trained on, chosen by their hash.
        length: tokens per window.
        train_on_prompts: count the tokens of prompts in the loss, too.

    Raises:
        TrainingError: if the data cannot be read, is empty or too short, or the
            tokenizer does not fit the model.
    """

    def __init__(
        self,
        folder: Path,
        data: Sequence[str | Path],
        tokenizer: Any,
        vocab_size: int,
        held_out: float,
        length: int,
        train_on_prompts: bool = False,
    ) -> None:
        self.length = length
        documents = Documents(data, lambda: tokenizer, by_answer=not train_on_prompts)
        key = _key(documents, tokenizer, vocab_size, held_out, train_on_prompts)
        manifest = _manifest(folder, key)
        if manifest is None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / NAME).unlink(missing_ok=True)
            _write_tokens(
                folder, documents, tokenizer, vocab_size, held_out, train_on_prompts
            )
            _balance(folder, documents, length)
            manifest = Manifest(
                key=key, documents=documents.count, skipped=documents.skipped
            )
            write_text(folder / NAME, manifest.model_dump_json())
        self.manifest = manifest
        self.tokens: dict[str, np.ndarray] = {}  # of each split, [tokens] TOKEN
        self.starts: dict[
            str, np.ndarray
        ] = {}  # of each split, [documents] index of the first token
        for split in SPLITS:
            tokens = _mapped(folder / f"{split}.tokens")
            if len(tokens) < length + 1:
                raise TrainingError(
                    f"the data holds {len(tokens)} {split.replace('_', '-')} tokens, "
                    f"but a window needs {length}; give more data, or a smaller "
                    "--sequence-length"
                )
            self.tokens[split] = tokens
            self.starts[split] = np.flatnonzero(tokens["begins"])
        if not self.tokens["train"]["counted"].any():
            raise TrainingError(
                "no token to train on belongs to a response; give data with "
                "responses, or --train-on-prompts"
            )

    def num_windows(self, split: str = "train") -> int:
        return (len(self.tokens[split]) - 1) // self.length

    def has_rows(self, split: str, ahead: int, windows: int | None = None) -> bool:
        """Whether any of the first windows (None: of all) has so many tokens in a row
        that count.
        """
        windows = self.num_windows(split) if windows is None else windows
        for start in range(0, windows, LOOKED_AT):
            batch = self.batch(split, range(start, min(start + LOOKED_AT, windows)))
            if batch.ahead(ahead)[1].any():
                return True
        return False

    def batch(
        self, split: str, windows: Sequence[int], shifts: Sequence[int] = ()
    ) -> Batch:
        """Windows of a split.

        Args:
            split: whose windows.
            windows: their numbers.
            shifts: tokens by which to move each window, wrapping at the end (none: on
                the grid).
        """
        tokens = self.tokens[split]
        starts = self.starts[split]
        last = len(tokens) - self.length
        moved = itertools.zip_longest(windows, shifts, fillvalue=0)
        begins = np.array(
            [(window * self.length + shift) % (last + 1) for window, shift in moved]
        )[:, None]
        places = begins + np.arange(self.length)
        rows = tokens[places]
        document_starts = starts[np.searchsorted(starts, places, side="right") - 1]
        return Batch(
            torch.from_numpy(rows["id"].astype(np.int64)),
            torch.from_numpy(places - np.maximum(document_starts, begins)),
            split,
            () if any(shifts) else tuple(windows),
            None if rows["counted"].all() else torch.from_numpy(rows["counted"].copy()),
        )

    def token_counts(self, vocab_size: int, split: str = "train") -> torch.Tensor:
        """How often each token occurs among those counted in the loss: [vocabulary] int32."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for ids in itertools.chain.from_iterable(self.responses(split)):
            counts += np.bincount(ids, minlength=vocab_size)
        return torch.from_numpy(counts.clip(max=2**31 - 1).astype(np.int32))

    def documents(self, split: str = "train") -> Iterator[np.ndarray]:
        """The token ids of every document, one after the other."""
        tokens = self.tokens[split]
        starts = self.starts[split]
        for begin, end in itertools.pairwise([*starts, len(tokens)]):
            yield np.asarray(tokens["id"][begin:end])

    def responses(self, split: str = "train") -> Iterator[list[np.ndarray]]:
        """The token ids of each document's stretches that count in the loss."""
        tokens = self.tokens[split]
        starts = self.starts[split]
        for begin, end in itertools.pairwise([*starts, len(tokens)]):
            rows = tokens[begin:end]
            edges = np.flatnonzero(
                np.diff(rows["counted"], prepend=False, append=False)
            )
            yield [rows["id"][first:last] for first, last in edges.reshape(-1, 2)]


class Order:
    """The windows of each step, a function of the step alone, so that a run that
    continues sees the same windows.

    Every epoch has another order, and another grid unless windows are read again from a
    cache.
    """

    def __init__(
        self, store: TokenStore, seed: int, batch_size: int, same_grid: bool
    ) -> None:
        self.store = store
        self.seed = seed
        self.batch_size = batch_size
        self.same_grid = same_grid
        self._permutation: tuple[int, torch.Tensor] | None = None

    def batches(
        self, step: int, parts: int, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """The step's windows in `parts` batches, of which a process computes every world-th."""
        size = self.batch_size // parts
        windows = [
            self._window(step * self.batch_size + i) for i in range(self.batch_size)
        ]
        for start in range(rank * size, parts * size, world * size):
            numbers, shifts = zip(*windows[start : start + size], strict=True)
            yield self.store.batch("train", numbers, shifts)

    def _window(self, index: int) -> tuple[int, int]:
        """(window number, shift in tokens)."""
        epoch, place = divmod(index, self.store.num_windows())
        if self._permutation is None or self._permutation[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._permutation = (
                epoch,
                torch.randperm(self.store.num_windows(), generator=generator),
            )
        shift = 0 if self.same_grid else epoch * SHIFT % self.store.length
        return int(self._permutation[1][place]), shift


def _write_tokens(
    folder: Path,
    documents: Documents,
    tokenizer: Any,
    vocab_size: int,
    held_out: float,
    train_on_prompts: bool,
) -> None:
    """Tokenise all documents into the two files."""
    end = tokenizer.eos_token_id
    control = control_tokens(tokenizer)
    train, held = (folder / f"{split}.tokens" for split in SPLITS)
    with train.open("wb") as train_file, held.open("wb") as held_file:
        file = train_file
        for document in tqdm(
            documents.tokens(), desc="tokenising", unit=" documents", mininterval=1
        ):
            ids = document.ids or []
            if _needs_end(document, end, control):
                ids = [*ids, end]
            check_vocabulary(ids, vocab_size)
            tokens = np.zeros(len(ids), TOKEN)
            tokens["id"] = ids
            tokens["counted"] = True
            tokens["begins"][:1] = True
            if document.mask is not None and not train_on_prompts:
                tokens["counted"][: len(document.mask)] = document.mask
            if not document.continues:
                file = held_file if _is_held_out(document, held_out) else train_file
            file.write(tokens.tobytes())


def _balance(folder: Path, documents: Documents, length: int) -> None:
    """Move tokens between the files where the prompts' hashes held out too many or too
    few.

    Raises:
        TrainingError: if there are no tokens at all.
    """
    train, held = (folder / f"{split}.tokens" for split in SPLITS)
    trained = len(_mapped(train))
    held_back = len(_mapped(held))
    if not trained + held_back:
        skips = f"; {documents.skips()}" if documents.skipped else ""
        if NO_RESPONSE in documents.skipped:
            raise TrainingError(
                f"no token of the data belongs to a response{skips}; give data with "
                "responses, or --train-on-prompts"
            )
        raise TrainingError(
            f"the data is empty ({len(documents.files)} files, no text{skips}); give "
            ".jsonl or text files with text"
        )
    if held_back > trained:  # most records have one prompt
        swapped = train.with_suffix(".swapped")
        train.rename(swapped)
        held.rename(train)
        swapped.rename(held)
        trained, held_back = held_back, trained
    if (
        held_back <= length
    ):  # too few whole documents were held out: add the training tokens' tail
        place = trained - min(trained // 2, length + 1)
        starts = np.flatnonzero(_mapped(train)["begins"][: place + 1])
        # Documents remain whole if there are several
        whole = starts[starts >= trained // 2]
        cut = int(whole[-1]) if len(whole) else place
        tail = np.array(_mapped(train)[cut:])
        tail["begins"][:1] = True
        with held.open("ab") as held_file:
            held_file.write(tail.tobytes())
        os.truncate(train, cut * TOKEN.itemsize)


def _mapped(path: Path) -> np.ndarray:
    """The tokens of a file: [tokens] TOKEN."""
    return np.memmap(path, TOKEN, "r") if path.stat().st_size else np.empty(0, TOKEN)


def _needs_end(document: Document, end: int | None, control: set[int]) -> bool:
    """Whether the end-of-text token is to be added: where neither the record nor a chat
    template has an end of its own.

    Args:
        document: with token ids.
        end: the end-of-text token, if there is one.
        control: tokens that no text has.
    """
    ids = document.ids or []
    mask = document.mask
    # Many chat templates write a line break after a turn's end.
    if (
        end is None
        or document.cut_off
        or end in ids[-2:]
        or not document.ends_with_response
    ):
        return False
    if mask is None:
        return True
    last = max(
        (place for place, is_written in enumerate(mask) if is_written), default=-1
    )
    return ids[last] not in control


def _is_held_out(document: Document, share: float) -> bool:
    """Whether a document is held out, by a hash of its prompt, so that no other answer
    to it is trained on.
    """
    digest = hashlib.sha256(json.dumps(document.asked).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < share


def _manifest(folder: Path, key: str) -> Manifest | None:
    """The manifest if the token files are complete and of this data; None if they must
    be written.
    """
    try:
        manifest = Manifest.model_validate_json((folder / NAME).read_bytes())
    except (OSError, ValidationError):
        return None
    return manifest if manifest.key == key else None


def _key(
    documents: Documents,
    tokenizer: Any,
    vocab_size: int,
    held_out: float,
    train_on_prompts: bool,
) -> str:
    """A hash of the tokens' sources: the names, sizes and times of the files, and the tokenizer."""
    stamp = [
        [str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns]
        for f in documents.files
    ]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else len(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    facts = [FORMAT, stamp, held_out, vocab_size, words, template, train_on_prompts]
    return digest_of_value(facts)

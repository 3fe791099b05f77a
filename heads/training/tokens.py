# SPDX-License-Identifier: Apache-2.0
"""The corpus as token ids on disk, and packed windows of it, so that memory does not
grow with the corpus.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from pydantic import BaseModel, ValidationError
from torch import Tensor
from tqdm import tqdm

from vllm_ppd.heads.data.documents import Documents, check_vocabulary
from vllm_ppd.heads.data.records import Document
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.files import digest_of_value, write_text
from vllm_ppd.heads.text import StrPath

SPLITS = ("train", "held_out")
# `counted`: in the loss; `begins`: the first of its document
TOKEN = np.dtype([("id", np.uint32), ("counted", np.bool_), ("begins", np.bool_)])
NAME = "tokens.json"  # describes the data of the token files next to it
COUNTED = 1 << 20  # tokens at once
FORMAT = 6  # of token files: incremented when the same data is stored differently


@dataclass
class Batch:
    """Packed windows. Positions restart at every document, and attention does not cross
    documents.
    """

    input_ids: Tensor  # [windows, length] int64
    position_ids: Tensor  # [windows, length] int64
    split: str = ""  # split of the store that has them
    windows: tuple[
        int, ...
    ] = ()  # their numbers in the split; empty if of no store
    # [windows, length] bool: tokens counted in the loss; None: all
    counted: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    def ahead(self, n: int) -> tuple[Tensor, Tensor]:
        """The n tokens that follow each token.

        Returns:
            (tokens [windows * length, n]; whether each of them, and all before it, are
            in the token's document and window and count in the loss [windows * length,
            n]).
        """
        length = self.input_ids.shape[1]
        device = self.input_ids.device
        steps = torch.arange(1, n + 1, device=device)
        following = (
            torch.arange(length, device=device)[:, None] + steps
        )  # [length, n]
        is_inside = following < length
        following = following.clamp(max=length - 1)
        # Positions restart at every document.
        expected = self.position_ids[..., None] + steps
        valid = is_inside & (self.position_ids[:, following] == expected)
        if self.counted is not None:
            valid &= self.counted[:, following]
        valid = valid.cummin(dim=-1).values
        return (
            self.input_ids[:, following].flatten(0, 1),
            valid.flatten(0, 1),
        )

    def to(self, device: torch.device) -> Batch:
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            counted=None if self.counted is None else self.counted.to(device),
        )


class Manifest(BaseModel):
    """What a store holds; it is written last, so that it marks the token files as complete."""

    # Hash of the names and times of the data files, the split and the tokenizer
    key: str
    documents: int  # records
    answers: int  # stretches of tokens that count in the loss
    counted: int  # these tokens
    skipped: dict[str, int]  # records, and answers of chats, by reason


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
        data: Sequence[StrPath],
        tokenizer: Any,
        vocab_size: int,
        held_out: float,
        length: int,
        train_on_prompts: bool = False,
    ) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.held_out = held_out
        self.length = length
        self.train_on_prompts = train_on_prompts
        documents = Documents(data, tokenizer, by_answer=not train_on_prompts)
        key = self._key(documents.files)
        try:
            manifest = Manifest.model_validate_json((folder / NAME).read_bytes())
        except (OSError, ValidationError):
            manifest = None
        if manifest is None or manifest.key != key:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / NAME).unlink(missing_ok=True)
            answers, counted = self._write(documents)
            self._balance(documents)
            manifest = Manifest(
                key=key,
                documents=documents.count,
                answers=answers,
                counted=counted,
                skipped=documents.skipped,
            )
            write_text(folder / NAME, manifest.model_dump_json())
        self.manifest = manifest
        # Of each split: [tokens] TOKEN, and [documents] the index of the first token
        self.tokens: dict[str, ndarray] = {}
        self.starts: dict[str, ndarray] = {}
        for split in SPLITS:
            count = self._count(split)
            if count < length + 1:
                raise TrainingError(
                    f"the data holds {count} {split.replace('_', '-')} tokens, "
                    f"but a window needs {length}; add data, or lower "
                    "--sequence-length"
                )
            self.tokens[split] = np.memmap(self._path(split), TOKEN, "r")
            self.starts[split] = np.flatnonzero(self.tokens[split]["begins"])

    def num_windows(self, split: str = "train") -> int:
        return (len(self.tokens[split]) - 1) // self.length

    def has_rows(self, ahead: int) -> bool:
        """Whether any training window has so many tokens in a row that count."""
        for window in range(self.num_windows()):
            if self.batch("train", [window]).ahead(ahead)[1][:, -1].any():
                return True
        return False

    def batch(self, split: str, windows: Sequence[int]) -> Batch:
        """Windows of a split, by their numbers."""
        tokens = self.tokens[split]
        starts = self.starts[split]
        firsts = np.array(windows)[:, None] * self.length
        indices = firsts + np.arange(self.length)
        rows = tokens[indices]
        document_starts = starts[
            np.searchsorted(starts, indices, side="right") - 1
        ]
        counted = rows["counted"]
        return Batch(
            torch.from_numpy(rows["id"].astype(np.int64)),
            torch.from_numpy(indices - np.maximum(document_starts, firsts)),
            split,
            tuple(windows),
            None if counted.all() else torch.from_numpy(counted.copy()),
        )

    def token_counts(self) -> Tensor:
        """How often each token occurs among those counted in the training loss:
        [vocabulary] int32.
        """
        tokens = self.tokens["train"]
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for start in range(0, len(tokens), COUNTED):
            some = tokens[start : start + COUNTED]
            counts += np.bincount(
                some["id"][some["counted"]], minlength=self.vocab_size
            )
        return torch.from_numpy(counts.clip(max=2**31 - 1).astype(np.int32))

    def responses(self) -> Iterator[list[ndarray]]:
        """The token ids of each training document's stretches that count in the loss."""
        tokens = self.tokens["train"]
        for begin, end in itertools.pairwise(
            [*self.starts["train"], len(tokens)]
        ):
            rows = tokens[begin:end]
            edges = np.flatnonzero(
                np.diff(rows["counted"], prepend=False, append=False)
            )
            yield [rows["id"][first:last] for first, last in edges.reshape(-1, 2)]

    def _path(self, split: str) -> Path:
        return self.folder / f"{split}.tokens"

    def _count(self, split: str) -> int:
        return self._path(split).stat().st_size // TOKEN.itemsize

    def _key(self, files: Sequence[Path]) -> str:
        """A hash of what the files depend on: the names, sizes and times of the data,
        the tokenizer, and the settings.
        """
        stamp = []
        for file in files:
            status = file.stat()
            stamp.append(
                [str(file.resolve()), status.st_size, status.st_mtime_ns]
            )
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        words = backend.to_str() if backend is not None else len(tokenizer)
        template = getattr(tokenizer, "chat_template", None)
        settings = [
            self.held_out,
            self.vocab_size,
            words,
            template,
            self.length,
        ]
        return digest_of_value([FORMAT, stamp, *settings, self.train_on_prompts])

    def facts(self) -> dict[str, Any]:
        """What was used of the data and what was left out, for the provenance."""
        manifest = self.manifest
        return {
            "tokens_in_data": len(self.tokens["train"]),
            "documents_in_data": manifest.documents,
            "answers_in_data": manifest.answers,
            "counted_tokens_in_data": manifest.counted,
            "skipped_records": manifest.skipped,
        }

    def _write(self, documents: Documents) -> tuple[int, int]:
        """Tokenize all documents into the two files.

        Returns:
            (stretches of tokens that count in the loss, these tokens).
        """
        answers = 0
        counted = 0
        end = self.tokenizer.eos_token_id
        control = control_tokens(self.tokenizer)
        train, held_out = map(self._path, SPLITS)
        with train.open("wb") as train_file, held_out.open("wb") as held_out_file:
            file = train_file
            for document in tqdm(
                documents.tokens(),
                desc="tokenizing",
                unit=" documents",
                mininterval=1,
            ):
                ids = document.ids or []
                if _needs_end(document, end, control):
                    ids = [*ids, end]
                check_vocabulary(ids, self.vocab_size)
                tokens = np.zeros(len(ids), TOKEN)
                tokens["id"] = ids
                tokens["counted"] = True
                tokens["begins"][:1] = True
                if document.mask is not None and not self.train_on_prompts:
                    tokens["counted"][: len(document.mask)] = document.mask
                if not document.continues:
                    is_held_out = _fraction_of(document) < self.held_out
                    file = held_out_file if is_held_out else train_file
                file.write(tokens.tobytes())
                mask = tokens["counted"]
                begins = np.diff(mask, prepend=False) & mask
                answers += int(begins.sum())
                counted += int(mask.sum())
        return answers, counted

    def _balance(self, documents: Documents) -> None:
        """Move tokens between the files where the prompts' hashes held out too many or
        too few.

        Raises:
            TrainingError: if there are no tokens at all.
        """
        train, held_out = map(self._path, SPLITS)
        counts = [self._count(split) for split in SPLITS]
        if not any(counts):
            skips = f"; {documents.skips()}" if documents.skipped else ""
            raise TrainingError(
                f"the data is empty ({len(documents.files)} files{skips}); pass .jsonl "
                "or text files with texts or responses, or --train-on-prompts"
            )
        if counts[1] > counts[0]:  # most records have one prompt
            swapped = train.with_suffix(".swapped")
            train.rename(swapped)
            held_out.rename(train)
            swapped.rename(held_out)
        if min(counts) <= self.length:
            # Too few whole documents are held out: add the tail of the others. It begins
            # with a document if there are several.
            tokens = np.memmap(train, TOKEN, "r")
            half = len(tokens) // 2
            cut = len(tokens) - min(half, self.length + 1)
            starts = np.flatnonzero(tokens["begins"][: cut + 1])
            if starts[-1] >= half:
                cut = int(starts[-1])
            tail = np.array(tokens[cut:])
            tail["begins"][:1] = True
            with held_out.open("ab") as file:
                file.write(tail.tobytes())
            os.truncate(train, cut * TOKEN.itemsize)


@dataclass
class Order:
    """The windows of each step, a function of the step alone, so that a run that
    continues sees the same windows. Every epoch has another order.
    """

    store: TokenStore
    seed: int
    batch_size: int

    def batches(
        self, step: int, parts: int, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """The step's windows in `parts` batches, of which a process computes every world-th."""
        size = self.batch_size // parts
        for part in range(step * parts + rank, (step + 1) * parts, world):
            windows = [self._window(part * size + i) for i in range(size)]
            yield self.store.batch("train", windows)

    def _window(self, index: int) -> int:
        count = self.store.num_windows()
        epoch, place = divmod(index, count)
        order = _permutation(count, self.seed * 1_000_003 + epoch)
        return int(order[place])


@lru_cache(maxsize=1)
def _permutation(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def control_tokens(tokenizer: Any) -> set[int]:
    """Ids of the tokens that no text has, such as those by which a chat template ends a turn."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token_id for token_id, token in added.items() if token.special}
    return special.union(tokenizer.all_special_ids)


def _needs_end(document: Document, end: int | None, control: set[int]) -> bool:
    """Whether the end-of-text token is to be added: where neither the record nor a chat
    template has an end of its own.

    Args:
        document: with token ids.
        end: the end-of-text token, if there is one.
        control: tokens that no text has.
    """
    ids = document.ids or []
    if end is None or document.cut_off or not document.ends_with_response:
        return False
    # Many chat templates write a line break after a turn's end.
    if end in ids[-2:]:
        return False
    if document.mask is None:
        return True
    written = list(itertools.compress(ids, document.mask))
    return control.isdisjoint(written[-1:])


def _fraction_of(document: Document) -> float:
    """A hash of what a document answers, in [0, 1): equal for all answers to a prompt,
    so that none of a prompt that is held out is trained on.
    """
    return int(digest_of_value(document.asked)[:8], 16) / 2**32

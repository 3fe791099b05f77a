# SPDX-License-Identifier: Apache-2.0
"""Chats that the target writes, in batches, each appended to the output file when it is done."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tqdm import tqdm
from transformers import AutoTokenizer

from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.data.prompts import document_prompts
from vllm_ppd.heads.errors import TrainingError, loading, refuse_other_options
from vllm_ppd.heads.files import write_text
from vllm_ppd.heads.generation.options import DataOptions
from vllm_ppd.heads.locking import writing_file
from vllm_ppd.heads.text import place

NUMBER = 1000  # chats to write if neither a number nor prompts are given
STRIDE = 4  # distance between prompts from a text, in prompt lengths
MOST_REFUSED = 2000  # consecutive user turns
USER_TURN = "ppd user turn"  # placeholder for the user's words in a rendered chat


class Sampling(NamedTuple):
    """How an engine continues a batch of prompts."""

    temperature: float
    top_p: float
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    stop_text: str | None = None
    wants_text: bool = False


class Continuation(NamedTuple):
    """What an engine writes after a prompt."""

    ids: list[int]  # including the end-of-text or stop token
    text: str  # without that token; empty if it is not wanted
    finish_reason: str  # "stop" or "length"


class Engine(Protocol):
    """An engine that continues prompts."""

    def generate(
        self, prompts: list[list[int]], seeds: list[int], sampling: Sampling
    ) -> list[Continuation]:
        """Continue prompts, each with its own seed."""

    def close(self) -> None:
        """End the engine's processes, which frees their memory."""


Asked = list[tuple[int, list[int]]]  # numbers and token IDs of prompts to answer


class ChatFile:
    """The chats of a .jsonl file in ascending order of their index, to which batches
    are appended.

    The index is the number of the prompt, or of the attempt at a user turn.

    A line that a kill has cut off is dropped. The options that all chats share are kept
    in a hidden file beside it.

    Args:
        path: the file, which has one writer at a time.
        essence: the options.

    Raises:
        TrainingError: if the file was written with other options, not by `ppd data`, or
            is damaged.
    """

    def __init__(self, path: Path, essence: dict[str, Any]) -> None:
        self.path = path
        self.count = 0  # chats
        self.tokens = 0  # with their prompts
        self.next_number = 0
        self.prompts: set[tuple[int, ...]] = set()
        options = path.with_name(f".{path.name}.options.json")
        if path.exists() and path.stat().st_size:
            self._check_options(options, essence)
            self._read()
        write_text(options, json.dumps(essence, indent=2) + "\n")

    def append(self, chats: Iterable[dict[str, Any]]) -> None:
        """Append a batch, and wait until it is on disk."""
        with self.path.open("a") as file:
            for chat in chats:
                file.write(json.dumps(chat) + "\n")
                self._note(chat)
            file.flush()
            os.fsync(file.fileno())

    def _check_options(self, options: Path, essence: dict[str, Any]) -> None:
        try:
            stored = dict(json.loads(options.read_bytes()))
        except (OSError, ValueError, TypeError):
            raise TrainingError(
                f"--out {place(self.path)} was not written by `ppd data`; give "
                "another file"
            ) from None
        written = f"--out {place(self.path)} was written"
        refuse_other_options(written, stored, essence, "another file")

    def _read(self) -> None:
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self._note(json.loads(line))
                except (ValueError, TypeError, KeyError):
                    raise TrainingError(
                        f"{place(self.path, number)} is damaged; delete this line and "
                        "run the command again"
                    ) from None
                end += len(line)
        os.truncate(self.path, end)

    def _note(self, chat: dict[str, Any]) -> None:
        prompt = tuple(chat["prompt_token_ids"])
        self.count += 1
        self.tokens += len(prompt) + len(chat["token_ids"])
        self.next_number = max(self.next_number, chat["index"] + 1)
        self.prompts.add(prompt)


def write_chats(
    options: DataOptions,
    engine_of: Callable[[DataOptions], Engine],
    until: float = math.inf,
) -> ChatFile:
    """Write the chats that a file lacks.

    Args:
        options: of `ppd data`.
        engine_of: makes the engine; called only if there is anything to write.
        until: time by time.monotonic() after which no batch begins but the first. It
            replaces the default number.

    Raises:
        InUse: if another process writes the file.
        TrainingError: on malformed prompts, another run's file, or a model that writes
            no user turns.
    """
    with loading(options.model):
        tokenizer = AutoTokenizer.from_pretrained(
            options.model, trust_remote_code=options.trust_remote_code
        )
    wanted = options.number or math.inf
    if options.number is None and not options.prompts and until == math.inf:
        wanted = NUMBER
    with writing_file(options.out):
        file = ChatFile(Path(options.out), options.essence())
        if file.count >= wanted:
            return file
        engine = engine_of(options)
        take = _source(options, tokenizer, engine, file)
        sampling = Sampling(options.temperature, options.top_p, options.max_tokens)
        total = None if math.isinf(wanted) else int(wanted)
        with tqdm(
            desc="writing chats", initial=file.count, total=total, unit=" chats"
        ) as bar:
            while file.count < wanted and (not file.count or time.monotonic() < until):
                asked = take(int(min(options.batch, wanted - file.count)))
                if not asked:
                    break
                seeds = [
                    _seed_of(options.seed, number, "assistant") for number, _ in asked
                ]
                answers = engine.generate(
                    [prompt for _, prompt in asked], seeds, sampling
                )
                file.append(map(_chat, asked, answers))
                bar.set_postfix_str(f"{file.tokens:,} tokens")
                bar.update(len(asked))
    return file


def _chat(asked: tuple[int, list[int]], answer: Continuation) -> dict[str, Any]:
    number, prompt = asked
    return {
        "prompt_token_ids": prompt,
        "token_ids": answer.ids,  # with the end-of-text token if the target wrote one
        "finish_reason": "stop" if answer.finish_reason == "stop" else "length",
        "index": number,
    }


def _source(
    options: DataOptions, tokenizer: Any, engine: Engine, file: ChatFile
) -> Callable[[int], Asked]:
    """A function that returns the next prompts of a number; fewer or none at their end."""
    prompts: Iterator[list[int]]
    if options.prompts:
        prompts = read_prompts(options, tokenizer)
    elif getattr(tokenizer, "chat_template", None):
        return UserTurns(options, tokenizer, engine, file).take
    else:
        prompts = itertools.repeat(beginning(tokenizer))
    missing = itertools.islice(enumerate(prompts), file.next_number, None)
    return lambda count: list(itertools.islice(missing, count))


def read_prompts(options: DataOptions, tokenizer: Any) -> Iterator[list[int]]:
    """Prompts in the files' order: chats up to the last user turn, prompts and token
    IDs as a whole, and stretches of --prompt-tokens of texts. Those that leave no room
    for a response are left out.

    Raises:
        TrainingError: on a file or a record that is malformed, or if there is no
            prompt.
    """
    documents = Documents(options.prompts, tokenizer, system=options.system)
    count = 0
    for prompts in document_prompts(documents, options.prompt_tokens, STRIDE):
        for ids in prompts:
            if ids and len(ids) < options.max_length:
                count += 1
                yield ids
    if not count:
        skips = f" ({documents.skips()})" if documents.skipped else ""
        raise TrainingError(
            f"--prompts: no record has a prompt of at most {options.max_length - 1} "
            f"tokens{skips}; give chats, prompts, or texts of {options.prompt_tokens} "
            "tokens"
        )


def beginning(tokenizer: Any) -> list[int]:
    """The prompt of whole texts: the token that begins a text, or ends one.

    Raises:
        TrainingError: if the tokenizer has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [token]
    raise TrainingError(
        "--model: the tokenizer has no chat template, nor a token that begins a "
        "text; give --prompts"
    )


class UserTurns:
    """User turns that the model writes after the beginning of its chat template
    (Magpie).

    Args:
        options: of the chats.
        tokenizer: has the chat template.
        engine: writes the turns.
        file: its prompts are not written again.

    Raises:
        TrainingError: if the rendered chat does not contain the user's message.
    """

    def __init__(
        self, options: DataOptions, tokenizer: Any, engine: Engine, file: ChatFile
    ) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.engine = engine
        self.seen = set(file.prompts)
        self.number = file.next_number
        before, shown, after = self._rendered(USER_TURN).partition(USER_TURN)
        if not shown:
            raise TrainingError(
                "--model: the chat template changes what the user writes; give "
                "--prompts"
            )
        self.prefix = self._ids(before)
        stop_ids = {tokenizer.eos_token_id} - {None}
        stop_text = None
        following = self._ids(after)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        if following and following[0] in {*tokenizer.all_special_ids, *added}:
            stop_ids.add(following[0])
        else:  # the template ends a user turn by text
            stop_text = next(iter(after.split()), None)
        self.sampling = Sampling(
            1.0, 0.95, 256, tuple(sorted(stop_ids)), stop_text, wants_text=True
        )

    def take(self, count: int) -> Asked:
        """Prompts from `count` attempts at user turns, or from more until one is
        usable.

        Raises:
            TrainingError: if the model writes no usable user turn.
        """
        asked: Asked = []
        refused = 0
        while not asked:
            if refused >= MOST_REFUSED:
                raise TrainingError(
                    f"the last {refused} user turns are too long, empty or repeated; "
                    "give --prompts"
                )
            numbers = range(self.number, self.number + count)
            self.number += count
            seeds = [_seed_of(self.options.seed, number, "user") for number in numbers]
            turns = self.engine.generate([self.prefix] * count, seeds, self.sampling)
            for number, turn in zip(numbers, turns, strict=True):
                prompt = self.prompt(turn.text.strip())
                if turn.finish_reason == "stop" and self._is_usable(turn.text, prompt):
                    self.seen.add(tuple(prompt))
                    asked.append((number, prompt))
            refused += count
        return asked

    def prompt(self, user: str) -> list[int]:
        """The token IDs of the prompt that vLLM's server makes of a user's message."""
        return self._ids(self._rendered(user))

    def _is_usable(self, text: str, prompt: list[int]) -> bool:
        if not text.strip() or "\ufffd" in text:
            return False
        return len(prompt) < self.options.max_length and tuple(prompt) not in self.seen

    def _rendered(self, user: str) -> str:
        messages = [{"role": "user", "content": user}]
        if self.options.system is not None:
            messages.insert(0, {"role": "system", "content": self.options.system})
        return str(
            self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        )

    def _ids(self, text: str) -> list[int]:
        return list(
            self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        )


def _seed_of(seed: int, number: int, who: str) -> int:
    """A seed for each request, the same in every run."""
    return int.from_bytes(
        hashlib.sha256(f"{seed} {number} {who}".encode()).digest()[:4], "big"
    )

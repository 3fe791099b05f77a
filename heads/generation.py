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
from typing import Any, NamedTuple

from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer

from vllm_ppd.heads.data.documents import Documents, document_prompts
from vllm_ppd.heads.errors import TrainingError, loading, refuse_other_options
from vllm_ppd.heads.files import write_json, writing_file
from vllm_ppd.heads.options import DataOptions
from vllm_ppd.heads.training.tokens import control_tokens

NUMBER = 1000  # chats to write if neither a number nor prompts are given
STRIDE = 4  # distance between prompts from a text, in prompt lengths
MOST_REFUSED = 2000  # consecutive user turns
USER_TURN = "ppd user turn"  # placeholder for the user's words in a rendered chat
Asked = tuple[int, list[int]]  # number and token IDs of a prompt to answer


class Sampling(NamedTuple):
    """How an engine continues a batch of prompts, as in vLLM's SamplingParams."""

    temperature: float
    top_p: float
    max_tokens: int
    stop_token_ids: list[int] | None = None
    stop: list[str] | None = None
    detokenize: bool = False


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
            try:
                stored = dict(json.loads(options.read_bytes()))
            except (OSError, ValueError, TypeError):
                raise TrainingError(
                    f"--out {path} was not written by `ppd data`; use another "
                    "file"
                ) from None
            written = f"--out {path} was written"
            refuse_other_options(written, stored, essence, "another file")
            self._read()
        write_json(options, essence)

    def append(self, asked: list[Asked], answers: Iterable[Any]) -> None:
        """Append a batch of vLLM's answers, and wait until it is on disk."""
        with self.path.open("a") as file:
            for (number, prompt), answer in zip(asked, answers, strict=True):
                is_whole = answer.finish_reason == "stop"
                chat = {
                    "prompt_token_ids": prompt,
                    # With the end-of-text token if the target wrote one
                    "token_ids": list(answer.token_ids),
                    "finish_reason": "stop" if is_whole else "length",
                    "index": number,
                }
                file.write(json.dumps(chat) + "\n")
                self._note(chat)
            file.flush()
            os.fsync(file.fileno())

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
                        f"{self.path}:{number} is damaged; delete this line and "
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


def within_context(tokens: int, config: Any) -> int:
    """A number of tokens, or a model's context if that is shorter; `config` is of its
    text model.
    """
    longest = getattr(config, "max_position_embeddings", None)
    return min(tokens, longest or tokens)


def write_chats(
    options: DataOptions,
    engine_of: Callable[[DataOptions], Any],
    until: float = math.inf,
) -> ChatFile:
    """Write the chats that a file lacks.

    Args:
        options: of `ppd data`.
        engine_of: makes an engine with OfflineEngine's `generate`; called only if there
            is anything to write.
        until: time by time.monotonic() after which no batch begins but the first. It
            replaces the default number.

    Raises:
        InUse: if another process writes the file.
        TrainingError: on malformed prompts, another run's file, or a model that writes
            no user turns.
    """
    code = options.trust_remote_code
    with loading(options.model):
        tokenizer = AutoTokenizer.from_pretrained(
            options.model, trust_remote_code=code
        )
        config = AutoConfig.from_pretrained(options.model, trust_remote_code=code)
    length = within_context(options.max_model_len, config.get_text_config())
    options = options.model_copy(update={"max_model_len": length})
    wanted = options.num_chats or math.inf
    if options.num_chats is None and not options.prompts and until == math.inf:
        wanted = NUMBER
    with writing_file(options.out):
        file = ChatFile(Path(options.out), options.essence())
        if file.count >= wanted:
            return file
        engine = engine_of(options)
        prompts = _prompts(options, tokenizer, engine, file)
        sampling = Sampling(
            options.temperature, options.top_p, options.max_tokens
        )
        total = None if math.isinf(wanted) else int(wanted)
        with tqdm(
            desc="writing chats", initial=file.count, total=total, unit=" chats"
        ) as bar:
            while file.count < wanted and (
                not file.count or time.monotonic() < until
            ):
                size = int(min(options.batch_size, wanted - file.count))
                asked = list(itertools.islice(prompts, size))
                if not asked:
                    break
                seeds = [
                    _seed_of(options.seed, number, "assistant")
                    for number, _ in asked
                ]
                answers = engine.generate(
                    [prompt for _, prompt in asked], seeds, sampling
                )
                file.append(asked, answers)
                bar.set_postfix_str(f"{file.tokens:,} tokens")
                bar.update(len(asked))
    return file


def _prompts(
    options: DataOptions, tokenizer: Any, engine: Any, file: ChatFile
) -> Iterator[Asked]:
    """The prompts that a file lacks."""
    prompts: Iterator[list[int]]
    if options.prompts:
        prompts = read_prompts(options, tokenizer)
    elif getattr(tokenizer, "chat_template", None):
        return user_turns(options, tokenizer, engine, file)
    else:  # whole texts
        token = tokenizer.bos_token_id
        if token is None:
            token = tokenizer.eos_token_id
        if token is None:
            raise TrainingError(
                "--model: the tokenizer has no chat template, nor a token that begins "
                "a text; pass --prompts"
            )
        prompts = itertools.repeat([token])
    return itertools.islice(enumerate(prompts), file.next_number, None)


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
    for _, prompts in document_prompts(documents, options.prompt_tokens, STRIDE):
        for ids in prompts:
            if ids and len(ids) < options.max_model_len:
                count += 1
                yield ids
    if not count:
        skips = f" ({documents.skips()})" if documents.skipped else ""
        raise TrainingError(
            f"--prompts: no record has a prompt of at most {options.max_model_len - 1} "
            f"tokens{skips}; pass chats, prompts, or texts of {options.prompt_tokens} "
            "tokens"
        )


def user_turns(
    options: DataOptions, tokenizer: Any, engine: Any, file: ChatFile
) -> Iterator[Asked]:
    """Prompts of user turns that the model writes after the beginning of its chat
    template (Magpie), except those of the file.

    Raises:
        TrainingError: if the rendered chat does not contain the user's message, or if
            the model writes no usable user turn.
    """

    def ids_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]

    def chat_of(user: str) -> str:
        messages = [{"role": "user", "content": user}]
        if options.system is not None:
            messages.insert(0, {"role": "system", "content": options.system})
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    before, shown, after = chat_of(USER_TURN).partition(USER_TURN)
    if not shown:
        raise TrainingError(
            "--model: the chat template changes what the user writes; pass --prompts"
        )
    size = min(options.batch_size, options.num_chats or options.batch_size)
    beginnings = [ids_of(before)] * size
    stop_ids = {tokenizer.eos_token_id} - {None}
    stop = None
    following = ids_of(after)[:1]
    if control_tokens(tokenizer).intersection(following):
        stop_ids.update(following)
    else:  # the template ends a user turn by text
        stop = after.split()[:1]
    sampling = Sampling(1.0, 0.95, 256, sorted(stop_ids), stop, detokenize=True)
    numbers = itertools.count(file.next_number)
    refused = 0
    while refused < MOST_REFUSED:
        batch = list(itertools.islice(numbers, size))
        seeds = [_seed_of(options.seed, number, "user") for number in batch]
        turns = engine.generate(beginnings, seeds, sampling)
        for number, turn in zip(batch, turns, strict=True):
            text = turn.text.strip()
            prompt = ids_of(chat_of(text))
            is_whole = turn.finish_reason == "stop" and "\ufffd" not in text
            is_new = tuple(prompt) not in file.prompts
            if (
                text
                and is_whole
                and is_new
                and len(prompt) < options.max_model_len
            ):
                file.prompts.add(tuple(prompt))
                refused = 0
                yield number, prompt
            else:
                refused += 1
    raise TrainingError(
        f"the last {refused} user turns are too long, empty or repeated; pass --prompts"
    )


def _seed_of(seed: int, number: int, who: str) -> int:
    """A seed for each request, the same in every run."""
    digest = hashlib.sha256(f"{seed} {number} {who}".encode())
    return int(digest.hexdigest()[:8], 16)

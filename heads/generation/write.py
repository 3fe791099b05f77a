# SPDX-License-Identifier: Apache-2.0
"""The writer of chats: user turns and responses as one stream of requests; each chat is written when it ends.

Numbers are begun in order, and only while fewer chats than wanted are in the file or begun. So the
file ends with the first numbers that give a chat, whatever the order in which they ended and earlier runs stopped.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.generation.options import DataOptions
from vllm_ppd.heads.generation.output import Chat, ChatFile
from vllm_ppd.heads.generation.prompts import ChatTemplate

MOST_REFUSED = 2000  # consecutive user turns
USER, ASSISTANT = "user", "assistant"


class Request(NamedTuple):
    """A text to continue."""

    key: str
    prompt: list[int]
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    stop_ids: tuple[int, ...] = ()
    stop_text: str | None = None
    wants_text: bool = False


class Continuation(NamedTuple):
    """An engine's output for a request."""

    key: str
    ids: list[int]  # including the end-of-text or stop token
    text: str  # without that token; empty if not requested
    finish_reason: str  # "stop" or "length"


class Engine(Protocol):
    """An engine that computes many requests at once, each with its own end: vLLM's, or one of the tests."""

    generated: int  # tokens so far, including unfinished requests

    def submit(self, request: Request) -> None:
        """Queue a request."""

    def step(self) -> list[Continuation]:
        """Compute one step of all requests; returns those that have ended."""


class Writer:
    """Keeps an engine full of prompts to answer.

    Args:
        options: sampling of the responses, and their number at a time.
        engine: computes the responses.
        file: takes the chats; it must be open, with earlier chats already read.
        report: called after every step of the engine.
    """

    def __init__(
        self, options: DataOptions, engine: Engine, file: ChatFile, report: Callable[[Writer], None] = lambda _: None
    ) -> None:
        self.options, self.engine, self.file, self.report = options, engine, file, report
        self.running = 0  # requests in the engine
        self.open = 0  # chats that are begun but neither written nor dropped
        self.wanted = 0.0  # chats for the file; report may lower it to the written and open ones
        self.prompts: deque[tuple[int, list[int]]] = deque()  # prompts to answer, with their numbers
        self._answering: dict[int, list[int]] = {}

    def answer(self, prompts: Iterable[list[int]], wanted: float) -> None:
        """Answer those prompts that the file lacks, in order, until it has a number of chats."""
        missing = ((number, ids) for number, ids in enumerate(prompts) if number not in self.file.numbers)

        def begin() -> bool:
            prompt = next(missing, None)
            self.prompts.extend([] if prompt is None else [prompt])
            return prompt is not None

        self._write(begin, wanted)

    def _write(self, begin: Callable[[], bool], wanted: float) -> None:
        """Write until the file has a number of chats, or begin() has no more to begin."""
        self.wanted = wanted
        while True:
            while self.running < self.options.batch:
                if self.prompts:
                    self._answer(*self.prompts.popleft())
                elif self.file.count + self.open < self.wanted and begin():
                    self.open += 1
                else:
                    break
            if not self.running:
                return
            for ended in self.engine.step():
                self.running -= 1
                self._take(ended)
            self.report(self)

    def _submit(self, request: Request) -> None:
        self.engine.submit(request)
        self.running += 1

    def _answer(self, number: int, prompt: list[int]) -> None:
        options = self.options
        self._answering[number] = prompt
        tokens = min(options.max_tokens, options.max_length - len(prompt))
        seed = seed_of(options.seed, number, ASSISTANT)
        self._submit(Request(f"{ASSISTANT} {number}", prompt, options.temperature, options.top_p, tokens, seed))

    def _take(self, ended: Continuation) -> None:
        number = int(ended.key.removeprefix(ASSISTANT))
        chat = Chat(
            prompt_token_ids=self._answering.pop(number), token_ids=ended.ids, index=number,
            finish_reason="stop" if ended.finish_reason == "stop" else "length",
        )  # fmt: skip
        self.file.write(chat)
        self.open -= 1


class ChatWriter(Writer):
    """Lets the model write user turns after its chat template's beginning, and answers them (Magpie).

    A user turn is answered when all turns before it are known: of two equal ones the first is kept.
    """

    def converse(self, template: ChatTemplate, seen: set[bytes], wanted: float) -> None:
        """Write and answer user turns until the file has a number of chats.

        Args:
            template: the target's.
            seen: keys of the prompts in the file.
            wanted: chats.

        Raises:
            TrainingError: if the model writes no usable user turn.
        """
        self._template, self._seen, self._beginning = template, seen, template.user_turn()
        self._numbers = (number for number in itertools.count() if number not in self.file.numbers)
        self._asked: deque[int] = deque()  # pending user turns, in order
        self._ended: dict[int, Continuation] = {}  # pending user turns that have ended
        self.refused: Counter[str] = Counter()
        self._refused_in_a_row = 0
        self._write(self._ask, wanted)

    def _ask(self) -> bool:
        options, beginning, number = self.options, self._beginning, next(self._numbers)
        seed = seed_of(options.seed, number, USER)
        self._submit(
            Request(
                f"{USER} {number}", beginning.prefix, options.user_temperature, options.user_top_p,
                options.user_max_tokens, seed, beginning.stop_ids, beginning.stop_text, wants_text=True,
            )
        )  # fmt: skip
        self._asked.append(number)
        return True

    def _take(self, ended: Continuation) -> None:
        if not ended.key.startswith(USER):
            super()._take(ended)
            return
        self._ended[int(ended.key.removeprefix(USER))] = ended
        while self._asked and self._asked[0] in self._ended:
            number = self._asked.popleft()
            words = self._ended.pop(number)
            prompt = self._template.prompt(words.text.strip())
            refusal = self._refusal(words, prompt)
            if refusal is None:
                self.prompts.append((number, prompt))
                self._refused_in_a_row = 0
            else:
                self.open -= 1
                self.refused[refusal] += 1
                self._refused_in_a_row += 1
        if self._refused_in_a_row >= MOST_REFUSED:
            reasons = ", ".join(f"{number} {reason}" for reason, number in self.refused.most_common(3))
            raise TrainingError(f"the last {MOST_REFUSED} user turns are not usable ({reasons}); give --prompts")

    def _refusal(self, words: Continuation, prompt: list[int]) -> str | None:
        """The reason to drop a user turn, if any; the key of an accepted one is remembered."""
        if words.finish_reason != "stop":
            return "are longer than --user-max-tokens"
        if not words.text.strip() or "\ufffd" in words.text:
            return "are empty or no text"
        if len(prompt) >= self.options.max_length:
            return "are longer than --max-length"
        key = self._template.key(prompt)
        if key in self._seen:
            return "were written before"
        self._seen.add(key)
        return None


def seed_of(seed: int, number: int, who: str) -> int:
    """A seed for each request, the same in every run."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number} {who}".encode()).digest()[:4], "big")

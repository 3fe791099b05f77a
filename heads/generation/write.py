# SPDX-License-Identifier: Apache-2.0
"""The writer: user turns and responses as one stream of requests; a chat is in the file as soon as it has ended.

Numbers are begun in order, and only while the chats in the file and those that are begun are fewer than wanted. So the
file ends with the first numbers that give a chat, in whatever order they ended and wherever earlier runs were killed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.generation.engine import Continuation, Engine, Request
from vllm_ppd.heads.generation.options import DataOptions
from vllm_ppd.heads.generation.output import Chat, ChatFile
from vllm_ppd.heads.generation.template import ChatTemplate

MOST_REFUSED = 2000  # user turns one after the other
USER, ASSISTANT = "user", "assistant"

Report = Callable[["Writer"], None]


class Writer:
    """Keeps an engine full with responses to write.

    Args:
        options: how the responses are sampled, and how many at a time.
        engine: computes them.
        file: where the chats go, opened, its earlier ones read.
        report: called after every step of the engine.
    """

    def __init__(self, options: DataOptions, engine: Engine, file: ChatFile, report: Report) -> None:
        self.options, self.engine, self.file, self.report = options, engine, file, report
        self.running = 0  # requests in the engine
        self.open = 0  # chats that were begun, and are neither written nor dropped
        self.prompts: deque[tuple[int, list[int]]] = deque()  # to be answered, with their numbers
        self._answering: dict[int, list[int]] = {}

    def write(self, more: Callable[[], bool], wanted: float) -> None:
        """Write until so many chats are in the file, or there are no more.

        Args:
            more: begins a chat; False if there is none left.
            wanted: chats in the file.
        """
        while True:
            while self.running < self.options.batch:
                if self.prompts:
                    self._answer(*self.prompts.popleft())
                elif self.file.count + self.open >= wanted or not more():
                    break
            if not self.running:
                return
            for ended in self.engine.step():
                self.running -= 1
                self._take(ended)
            self.report(self)

    def begin(self, index: int, prompt: list[int]) -> None:
        """Queue a prompt."""
        self.prompts.append((index, prompt))

    def submit(self, request: Request) -> None:
        self.engine.submit(request)
        self.running += 1

    def _answer(self, index: int, prompt: list[int]) -> None:
        options = self.options
        self._answering[index] = prompt
        tokens = min(options.max_tokens, options.max_length - len(prompt))
        seed = seed_of(options.seed, index, ASSISTANT)
        self.submit(Request(f"{ASSISTANT} {index}", prompt, options.temperature, options.top_p, tokens, seed))

    def _take(self, ended: Continuation) -> None:
        index = int(ended.key.removeprefix(ASSISTANT))
        chat = Chat(
            prompt_token_ids=self._answering.pop(index), token_ids=ended.ids, index=index,
            finish_reason="stop" if ended.finish_reason == "stop" else "length",
        )  # fmt: skip
        self.file.write(chat)
        self.open -= 1


class PromptWriter(Writer):
    """Answers prompts that are given."""

    def answer(self, prompts: Iterator[list[int]], wanted: float) -> None:
        """Answer prompts in order, those that the file has left out, until so many chats are in it."""
        rest = ((index, ids) for index, ids in enumerate(prompts) if index not in self.file.decided)

        def more() -> bool:
            found = next(rest, None)
            if found is not None:
                self.begin(*found)
                self.open += 1
            return found is not None

        self.write(more, wanted)


class ChatWriter(Writer):
    """Lets the model write user turns after its chat template's beginning, and answers them (Magpie).

    A user turn is answered when all before it are known: of two equal ones the first is kept, whichever ended first.
    """

    def converse(self, template: ChatTemplate, seen: set[bytes], wanted: int) -> None:
        """Write and answer user turns until so many chats are in the file.

        Args:
            template: the target's.
            seen: keys of the prompts in the file.
            wanted: chats.

        Raises:
            TrainingError: if the model writes no usable user turn.
        """
        self._template, self._seen, self._turn = template, seen, template.user_turn()
        self._numbers = (number for number in itertools.count() if number not in self.file.decided)
        self._asked: deque[int] = deque()  # user turns that are not known yet, in order
        self._turns: dict[int, Continuation] = {}  # those of them that have ended
        self.refused: Counter[str] = Counter()
        self._refused_in_a_row = 0
        self.write(self._ask, wanted)

    def _ask(self) -> bool:
        options, turn, number = self.options, self._turn, next(self._numbers)
        request = Request(
            f"{USER} {number}", turn.prefix, options.user_temperature, options.user_top_p, options.user_max_tokens,
            seed_of(options.seed, number, USER), turn.stop_ids, turn.stop_text, wants_text=True,
        )  # fmt: skip
        self.submit(request)
        self._asked.append(number)
        self.open += 1
        return True

    def _take(self, ended: Continuation) -> None:
        if not ended.key.startswith(USER):
            super()._take(ended)
            return
        self._turns[int(ended.key.removeprefix(USER))] = ended
        while self._asked and self._asked[0] in self._turns:
            number = self._asked.popleft()
            turn = self._turns.pop(number)
            prompt = self._template.prompt([{"role": USER, "content": turn.text.strip()}])
            refusal = self._refusal(turn, prompt)
            if refusal is None:
                self.begin(number, prompt)
            else:
                self.file.drop(number)
                self.open -= 1
                self.refused[refusal] += 1
            self._refused_in_a_row = 0 if refusal is None else self._refused_in_a_row + 1
        if self._refused_in_a_row >= MOST_REFUSED:
            reasons = ", ".join(f"{number} {reason}" for reason, number in self.refused.most_common(3))
            raise TrainingError(f"the last {MOST_REFUSED} user turns are not usable ({reasons}); give --prompts")

    def _refusal(self, turn: Continuation, prompt: list[int]) -> str | None:
        """Why a user turn is not answered; one that is, is remembered."""
        if turn.finish_reason != "stop":
            return "are longer than --user-max-tokens"
        if not turn.text.strip() or "\ufffd" in turn.text:
            return "are empty or no text"
        if len(prompt) >= self.options.max_length:
            return "are longer than --max-length"
        key = self._template.key(prompt)
        if key in self._seen:
            return "were written before"
        self._seen.add(key)
        return None


def seed_of(seed: int, index: int, who: str) -> int:
    """A seed for each request, the same in every run."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index} {who}".encode()).digest()[:4], "big")

# SPDX-License-Identifier: Apache-2.0
"""Requests of ShareGPT-like lengths, drawn from a seed; texts and their true continuations from the data.

Chats are short for the most part and long now and then: lengths are log-normal. A share of the prompts begins alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.serve.options import SHORTEST, ServeOptions
from vllm_ppd.heads.data.documents import Documents

READ = 4  # vLLM's ShareGPT loader leaves out what is shorter
TRIES = 100  # pieces of text a request, of which one has tokens enough
MOST_TOKENS = 4_000_000  # of the data, to be drawn from


class Request(NamedTuple):
    """A prompt, and the text that followed it in the data: the request generates as many tokens as that has."""

    prompt: str
    answer: str


class Lengths(NamedTuple):
    """Tokens of each request: [requests] each."""

    prompt: np.ndarray
    answer: np.ndarray
    shared: np.ndarray  # of the prompt's, those of the common beginning


def draw_lengths(options: ServeOptions, rng: np.random.Generator) -> Lengths:
    """Log-normal lengths, clipped so that a request fits the context."""
    count = options.requests
    longest = options.context // 2
    answer = options.new_tokens * np.exp(options.new_spread * rng.standard_normal(count))
    prompt = options.prompt_tokens * np.exp(options.prompt_spread * rng.standard_normal(count))
    shared = np.zeros(count, dtype=int)
    shared[rng.permutation(count)[: round(options.shared * count)]] = options.shared_tokens
    return Lengths(
        np.clip(prompt.astype(int), SHORTEST, longest - shared) + shared,
        np.clip(answer.astype(int), SHORTEST, longest),
        shared,
    )


class Texts:
    """The data as one stream of tokens."""

    def __init__(self, options: ServeOptions) -> None:
        """Read it.

        Raises:
            BenchError, TrainingError: if a file is missing or malformed, or all of them are shorter than a request.
        """
        from transformers import AutoTokenizer

        self.options = options
        name = options.tokenizer or options.model
        self.tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=options.trust_remote_code)
        self.stream: list[int] = []
        documents = Documents(options.data, lambda: self.tokenizer)
        for ids in documents.token_ids():
            self.stream += documents.special.bare(ids)  # the server adds its own to each prompt
            if len(self.stream) >= MOST_TOKENS:
                break
        needed = options.context + options.shared_tokens
        if len(self.stream) <= needed:
            raise BenchError(
                f"{', '.join(options.data)}: {len(self.stream):,} tokens in all, and a request may take {needed:,}; "
                "give more text"
            )

    def requests(self, *seed: int) -> list[Request]:
        """The requests of a turn; the same seed gives the same ones.

        Raises:
            BenchError: if the texts do not keep their tokens when they are read again.
        """
        rng = np.random.default_rng([self.options.seed, *seed])
        lengths = draw_lengths(self.options, rng)
        beginning = self.piece(rng, self.options.shared_tokens)
        return [
            self._request(rng, beginning[:shared], int(prompt - shared), int(answer))
            for prompt, answer, shared in zip(*lengths, strict=True)
        ]

    def _request(self, rng: np.random.Generator, beginning: list[int], own: int, answer: int) -> Request:
        for _ in range(TRIES):
            piece = self.piece(rng, own + answer)
            prompt = self._text(beginning + piece[:own], len(beginning) + own)
            found = self._text(piece[own:], answer)
            if self._fits(prompt) and self._fits(found):
                return Request(prompt, found)
        raise BenchError(f"{', '.join(self.options.data)}: its text has fewer tokens when it is read again")

    def piece(self, rng: np.random.Generator, length: int) -> list[int]:
        start = int(rng.integers(len(self.stream) - length))
        return self.stream[start : start + length]

    def _text(self, ids: list[int], most: int) -> str:
        """The text of so many tokens at most, also when it is read again."""
        text: str = self.tokenizer.decode(ids)
        while ids and self._count(text) > most:
            ids = ids[:-1]
            text = self.tokenizer.decode(ids)
        return text

    def _fits(self, text: str) -> bool:
        return self._count(text) >= READ

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text, verbose=False)["input_ids"])


def write_sharegpt(requests: list[Request], path: Path) -> None:
    """The requests as vLLM's `--dataset-name sharegpt` reads them."""

    def turns(request: Request) -> Iterator[dict[str, str]]:
        yield {"from": "human", "value": request.prompt}
        yield {"from": "gpt", "value": request.answer}

    path.write_text(json.dumps([{"conversations": list(turns(request))} for request in requests]))

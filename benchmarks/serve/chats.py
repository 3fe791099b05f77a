# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompts are what the data's records ask, as the chats of Spec-Bench and GSM8K."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.serve.options import ServeOptions
from vllm_ppd.benchmarks.serve.workload import READ, Request, Texts, draw_lengths
from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.data.records import Document


class Chats(Texts):
    """Chats up to the user's last turn, prompts, token ids, and beginnings of texts, in an order drawn from the seed.

    Lengths of the answers are drawn, too. Their texts are pieces of the data: vLLM's load generator reads of them how
    many tokens to ask for.
    """

    def __init__(self, options: ServeOptions) -> None:
        """Read them.

        Raises:
            BenchError, TrainingError: as Texts, or if no prompt fits half of the context.
        """
        super().__init__(options)
        documents = Documents(options.data, lambda: self.tokenizer, report=False)
        found = [self._bare(self._asked(document)) for document in documents]
        self.prompts = [text for text in found if READ <= self._count(text) <= options.context // 2]
        if not self.prompts:
            raise BenchError(
                f"--chats: none of {len(found)} prompts has up to {options.context // 2} tokens; give more --context"
            )
        if len(self.prompts) < len(found):
            print(f"{len(found) - len(self.prompts)} of {len(found)} chats are longer than half of --context, left out")

    def requests(self, *seed: int) -> list[Request]:
        """The requests of a turn; the same seed gives the same ones. A chat comes again after all others."""
        rng = np.random.default_rng([self.options.seed, *seed])
        count = self.options.requests
        rounds = [rng.permutation(len(self.prompts)) for _ in range(-(-count // len(self.prompts)))]
        lengths = draw_lengths(self.options, rng).answer
        return [
            Request(self.prompts[chat], self._answer(rng, int(length)))
            for chat, length in zip(np.concatenate(rounds)[:count], lengths, strict=True)
        ]

    def _answer(self, rng: np.random.Generator, length: int) -> str:
        while True:
            text = self._text(self.piece(rng, length), length)
            if self._fits(text):
                return text

    def _asked(self, document: Document) -> str:
        if document.prompt is not None:
            return document.prompt
        if document.prompt_ids is not None:
            return str(self.tokenizer.decode(document.prompt_ids))
        half = self.options.context // 2
        ids = self.tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        return document.text if len(ids) <= half else self._text(ids[:half], half)

    def _bare(self, text: str) -> str:
        """Without the beginning that the server's tokenizer adds to a prompt by itself."""
        tokenizer: Any = self.tokenizer
        if tokenizer.bos_token is None or tokenizer.bos_token_id not in tokenizer("a")["input_ids"]:
            return text
        return text.removeprefix(tokenizer.bos_token)

# SPDX-License-Identifier: Apache-2.0
"""Requests to /v1/completions, each a pure function of its index, so every server and every run gets the same.

On a CPU, vLLM alone dies of a seeded sampling request whose prompt is computed in several chunks: it would set back a
CPU generator by one draw. So these stay below CHUNK tokens including their answers, since a preempted request is
computed again; greedy prompts above CHUNK are computed in chunks.
"""

import random
from dataclasses import dataclass
from typing import Any

from vllm_ppd.benchmarks.models.corpus import split

CHUNK = 96  # --long-prefill-token-threshold of every server
LONGEST_ANSWER = 64
SHARED = 64  # tokens that some prompts begin with, for the prefix cache
PERIOD, LATEST = 10, 150  # the last of each ten repeats the first of up to so many tens before
STRUCTURES: tuple[dict[str, Any], ...] = (
    {"regex": "[a-f]{3}[0-9]{1,6}"},
    {"choice": ["import os", "import sys", "return"]},
    {"json": {"type": "object", "properties": {"a": {"enum": [1, 22, 333]}, "b": {"type": "boolean"}},
              "required": ["a", "b"], "additionalProperties": False}},
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A request, and when the client hangs up.

    Attributes:
        hang_up: chunks of the stream after which it does; None: it reads to the end.
        repeats: index of an earlier request with a seed that this one repeats.
    """

    index: int
    body: dict[str, Any]
    hang_up: int | None = None
    repeats: int | None = None

    @property
    def greedy(self) -> bool:
        return self.body["temperature"] == 0

    @property
    def seeded(self) -> bool:
        return "seed" in self.body


class Workload:
    """The requests.

    Args:
        model: the server's name of the model, a folder with its tokenizer.
    """

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        text = "\n".join(split()[1])
        self.model = model
        self.stream: list[int] = AutoTokenizer.from_pretrained(model)(text, verbose=False)["input_ids"]

    def request(self, index: int) -> Request:
        tens, place = divmod(index, PERIOD)
        rng = random.Random(index)
        if place == PERIOD - 1:
            original = PERIOD * max(0, tens - rng.randrange(LATEST))
            return Request(index, self._body(random.Random(original), seed=original), repeats=original)
        if place == 0:
            return Request(index, self._body(rng, seed=index))
        seed = index if rng.random() < 0.2 else None
        body = self._body(rng, seed)
        if rng.random() < 0.15 * PERIOD / (PERIOD - 2):  # 15 % of all
            body |= {"stream": True, "max_tokens": rng.randrange(24, 40), "ignore_eos": True}
            return Request(index, {**body, "stop": None}, hang_up=rng.randrange(6))
        return Request(index, body)

    def _body(self, rng: random.Random, seed: int | None) -> dict[str, Any]:
        """The body of a request; those with a seed sample and are short."""
        draw = rng.random
        sampled = seed is not None or draw() < 0.3
        answer = round(2 ** rng.uniform(0, 6))
        length = round(2 ** rng.uniform(1, 5 if seed is not None else 8))
        body: dict[str, Any] = {
            "model": self.model, "prompt": self._prompt(rng, length), "return_token_ids": True, "temperature": 0,
            "max_tokens": min(answer, LONGEST_ANSWER if seed is None else CHUNK - length - 1),
            "ignore_eos": draw() < 0.5, "stream": draw() < 0.3,
        }  # fmt: skip
        if sampled:
            body |= {"temperature": rng.choice([0.5, 0.8, 1.0, 1.2])}
            body |= {"top_p": rng.choice([0.5, 0.9])} if draw() < 0.3 else {}
            body |= {"top_k": rng.choice([1, 5, 50])} if draw() < 0.3 else {}
        if seed is not None:
            body["seed"] = seed
        for name, values in (
            ("repetition_penalty", [1.1, 1.4]), ("presence_penalty", [-0.5, 1.0]), ("frequency_penalty", [0.3, 1.0]),
            ("min_tokens", [1, min(4, body["max_tokens"])]), ("logprobs", [0, 3]), ("bad_words", [["self"], ["("]]),
            ("stop", [["\n"], [")", "self."]]), ("stop_token_ids", [[9], [262, 273]]),
            ("vllm_xargs", [{"ppd_draft": False}]), ("structured_outputs", STRUCTURES),
        ):  # fmt: skip
            if draw() < 0.05:
                body[name] = rng.choice(values)
        if "structured_outputs" in body:
            # Nothing else may forbid the only token that the structure allows.
            body |= {"ignore_eos": False, "min_tokens": 0, "bad_words": [], "stop_token_ids": []}
        return body

    def _prompt(self, rng: random.Random, length: int) -> list[int]:
        shared = SHARED if length > SHARED and rng.random() < 0.5 else 0
        return self._piece(random.Random(-1 - rng.randrange(4)), shared) + self._piece(rng, length - shared)

    def _piece(self, rng: random.Random, tokens: int) -> list[int]:
        start = rng.randrange(len(self.stream) - tokens)
        return self.stream[start : start + tokens]

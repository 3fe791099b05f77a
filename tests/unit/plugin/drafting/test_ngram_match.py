# SPDX-License-Identifier: Apache-2.0
"""The n-gram matcher of the prompt lookup: what it finds, and that no text makes it slow."""

import time

import numpy as np
import pytest

from vllm_ppd.vllm_plugins.drafting import ngram_match
from vllm_ppd.vllm_plugins.drafting.ngram_match import longest_matches
from vllm_ppd.vllm_plugins.drafting.prompt_lookup import LONGEST_LOOKUP, find


def brute_force(text: list[int], longest: int) -> tuple[int, int]:
    """(length, index of the last token) of the first of the longest matches."""
    for length in range(min(longest, len(text) - 1), 0, -1):
        for start in range(len(text) - length):
            if text[start : start + length] == text[-length:]:
                return length, start + length - 1
    return 0, 0


def fibonacci(tokens: int) -> list[int]:
    """The Fibonacci word: full of repeats, none of them a run."""
    word, after = [1], [1, 2]
    while len(word) < tokens:
        word, after = after, after + word
    return word[:tokens]


def batch(texts: list[list[int]], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of 200 tokens, with leftovers of other requests behind each text, as in vLLM's batch."""
    token_ids = np.random.default_rng(seed).integers(0, 3, size=(len(texts), 200), dtype=np.int32)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = text
    return token_ids, np.array([len(text) for text in texts], dtype=np.int64)


@pytest.mark.parametrize("block", [1, 300, 1 << 18])
@pytest.mark.parametrize("longest", [1, 2, 5, LONGEST_LOOKUP])
def test_it_finds_what_brute_force_finds(monkeypatch: pytest.MonkeyPatch, block: int, longest: int) -> None:
    monkeypatch.setattr(ngram_match, "BLOCK", block)
    rng = np.random.default_rng(longest)
    texts = [[], [0], [0, 0], [0, 1], [0, 0, 0], [1, 0, 0], [0] * longest, [0] * (longest + 1), [0] * 200, [0, 1] * 100]
    texts += [fibonacci(tokens) for tokens in (5, 34, 150)]
    for tokens in (1, 2, 3, 8):
        texts += [rng.integers(0, tokens, size=rng.integers(0, 201)).tolist() for _ in range(25)]
    for period in (2, 7, 31, 32, 33, 60):  # matches that overlap the end, longer than LONGEST_LOOKUP or not
        texts.append((rng.integers(0, 4, size=period).tolist() * 100)[: rng.integers(period, 201)])
    token_ids, ends = batch(texts, longest)
    lengths, places = longest_matches(token_ids, ends, longest)
    assert list(zip(lengths.tolist(), places.tolist(), strict=True)) == [brute_force(text, longest) for text in texts]


def test_a_row_that_is_not_looked_up_finds_nothing() -> None:
    token_ids = np.ones((3, 50), dtype=np.int32)
    lengths, places = longest_matches(token_ids, np.array([0, 50, 1]), 4)
    assert (lengths.tolist(), places.tolist()) == ([0, 4, 0], [0, 3, 0])
    for part in longest_matches(token_ids[:0], np.zeros(0, dtype=np.int64), 4):
        assert (part.dtype, part.shape) == (np.int64, (0,))
    drafts = find(token_ids, np.array([0, 50, 1]), 1, 3)
    assert (drafts.counts.tolist(), drafts.tokens.tolist()) == ([0, 3, 0], [[0] * 3, [1] * 3, [0] * 3])


TEXTS = {"one token": lambda tokens: [1] * tokens, "two": lambda tokens: [1, 2] * (tokens // 2), "Fibonacci": fibonacci,
         "random": lambda tokens: np.random.default_rng(0).integers(0, 32_000, size=tokens).tolist()}  # fmt: skip


@pytest.mark.parametrize(("tokens", "rows"), [(t, r) for t in (1_000, 8_000, 100_000) for r in (1, 8, 32)])
@pytest.mark.parametrize("name", TEXTS)
def test_no_text_is_slow(name: str, tokens: int, rows: int) -> None:
    """At most 10 ms a row at 100K tokens, of this thread's own time; it takes less than 1."""
    token_ids, seconds = np.array([TEXTS[name](tokens)] * rows, dtype=np.int32), []
    for _ in range(3):
        before = time.thread_time()
        find(token_ids, np.full(rows, tokens), 3, 8)
        seconds.append(time.thread_time() - before)
    assert min(seconds) < 5e-3 + 1e-7 * rows * tokens

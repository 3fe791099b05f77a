# SPDX-License-Identifier: Apache-2.0
"""Which requests can look drafts up: the scheduler's view is that of a search through
the whole text.
"""

import numpy as np
import pytest

from vllm_ppd.vllm_plugins.draft_length.repeated_text import RepeatedText


def occurred_before(text: list[int], shortest: int) -> bool:
    """Whether the last tokens of a text have a place before, with a token after it."""
    last = text[-shortest:]
    return len(text) > shortest and any(
        text[i : i + shortest] == last for i in range(len(text) - shortest)
    )


@pytest.mark.parametrize("shortest", [1, 2, 3, 7])
def test_it_is_what_a_search_finds(shortest: int) -> None:
    rng = np.random.default_rng(shortest)
    texts = RepeatedText(shortest)
    seen = set()
    for name in "abcd":
        text = rng.integers(0, 2 if shortest == 7 else 4, 120)
        length = int(rng.integers(1, 9))
        while length <= len(text):
            texts.extend(name, text[:length].tolist())
            found = occurred_before(text[:length].tolist(), shortest)
            assert texts.repeats([name]) == [found], (name, length)
            seen.add(found)
            length += int(rng.integers(1, 4))
    assert seen == {False, True}


def test_ended_requests_are_forgotten() -> None:
    texts = RepeatedText(2)
    for name in "abc":
        texts.extend(name, [1, 2, 1, 2])
    texts.forget_others(dict.fromkeys("bvwxyz"))  # most of them wait
    assert set(texts._seen) == {"b"}
    assert texts.repeats(["a", "b", "c"]) == [False, True, False]
    texts.extend("a", [3, 4])
    assert texts.repeats(["a"]) == [False]

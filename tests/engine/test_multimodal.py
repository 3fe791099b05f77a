# SPDX-License-Identifier: Apache-2.0
"""Multimodal targets: drafts are of the language model, and greedy output is vLLM's,
with sounds and without.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny_multimodal
from cases import CASES, generate, greedy, prompts
from conftest import Factory, accepting, full_but, start_engine
from methods import METHODS

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def target(tiny_model: Factory, made_once: Factory) -> Path:
    text_model = tiny_model(tiny_multimodal.TEXT)
    return made_once(
        "multimodal", lambda folder: tiny_multimodal.make(folder, text_model)
    )


@pytest.fixture(scope="module")
def stock(target: Path) -> Any:
    return start_engine(target, None, limit_mm_per_prompt={"audio": 1})


def with_sounds(llm: Any, seed: int = 0) -> list[list[int]]:
    """Every other request has a sound in it."""
    requests: list[dict[str, Any]] = list(prompts(8))
    for i in range(0, 8, 2):
        ids = requests[i]["prompt_token_ids"]
        requests[i] = {
            "prompt_token_ids": [*ids[:2], tiny_multimodal.AUDIO, *ids[2:]],
            "multi_modal_data": {"audio": tiny_multimodal.sound(seed + i)},
        }
    return generate(llm, requests, greedy())


@pytest.mark.parametrize("method", full_but({"cp", "early"}, METHODS))
def test_same_tokens(
    stock: Any,
    target: Path,
    with_heads: Factory,
    method: str,
) -> None:
    """The heads were fitted to the text model that the language model is."""
    expected = with_sounds(stock)
    others = zip(with_sounds(stock, seed=100), expected, strict=True)
    changed = [a != b for a, b in others]
    assert any(changed[::2]) and not any(changed[1::2]), "sounds change nothing"
    options = with_heads(METHODS[method], tiny_multimodal.TEXT, target)
    llm = start_engine(target, options, limit_mm_per_prompt={"audio": 1})
    with accepting(llm):
        assert with_sounds(llm) == expected
        assert CASES["batch_16"](llm) == CASES["batch_16"](stock)


@pytest.mark.full
def test_compiled(target: Path) -> None:
    """Stacks that start from embeddings are compiled, too."""
    outputs = [
        with_sounds(start_engine(target, options, enforce_eager=False))
        for options in (None, METHODS["early"])
    ]
    assert outputs[0] == outputs[1]

# SPDX-License-Identifier: Apache-2.0
"""Multimodal targets: drafts are of the language model, and greedy output is vLLM's,
with sounds and without.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import tiny_multimodal
from cases import CASES, greedy, prompts
from conftest import Factory, start_engine
from methods import METHODS

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def target(tiny_model: Factory, made_once: Factory) -> Path:
    return made_once(
        "multimodal",
        lambda folder: tiny_multimodal.make(folder, tiny_model(tiny_multimodal.TEXT)),
    )


@pytest.fixture(scope="module")
def started(target: Path, with_heads: Factory) -> Factory:
    """started(method): an engine; its heads were fitted to the text model that the
    language model is.
    """

    @functools.cache
    def get(method: str | None = None) -> Any:
        options = None
        if method is not None:
            options = with_heads(METHODS[method], tiny_multimodal.TEXT, target)
        return start_engine(target, options, limit_mm_per_prompt={"audio": 1})

    return get


def with_sounds(llm: Any, seed: int = 0) -> list[list[int]]:
    """Every other request has a sound in it."""
    requests: list[dict[str, Any]] = list(prompts(8))
    for i in range(0, 8, 2):
        ids = requests[i]["prompt_token_ids"]
        requests[i] = {
            "prompt_token_ids": [*ids[:2], tiny_multimodal.AUDIO, *ids[2:]],
            "multi_modal_data": {"audio": tiny_multimodal.sound(seed + i)},
        }
    outputs = llm.generate(requests, greedy(), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("method", METHODS)
def test_same_tokens(started: Factory, method: str) -> None:
    stock = started()
    llm = started(method)
    expected = with_sounds(stock)
    assert with_sounds(llm) == expected
    changed = [
        a != b for a, b in zip(with_sounds(stock, seed=100), expected, strict=True)
    ]
    assert any(changed[::2]) and not any(changed[1::2]), "sounds change nothing"
    assert CASES["batch_16"](llm) == CASES["batch_16"](stock)
    assert llm.counts["accepted"] > 0


@pytest.mark.full
def test_compiled(target: Path) -> None:
    """Stacks that start from embeddings are compiled, too."""
    outputs = [
        with_sounds(start_engine(target, options, enforce_eager=False))
        for options in (None, METHODS["early"])
    ]
    assert outputs[0] == outputs[1]

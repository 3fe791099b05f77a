# SPDX-License-Identifier: Apache-2.0
"""On runner V2, greedy output equals vLLM's without speculation, token for token, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cases import CASES, generate, greedy, prompts
from small import Small, demo_heads

pytestmark = pytest.mark.engine

VARIANTS: dict[str, dict[str, Any]] = {
    "cp": {"method": "cp", "model": demo_heads("cp")},
}
LONG = ("arrivals_and_aborts", "more_than_fit", "token_limits")  # drive the engine themselves, or many times


@pytest.fixture(scope="module")
def expected(v2_engine: Callable[..., Any]) -> Callable[[str], Any]:
    found: dict[str, Any] = {}

    def get(case: str) -> Any:
        if case not in found:
            found[case] = CASES[case](Small(v2_engine()))
        return found[case]

    return get


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] if case in LONG else []) for case in CASES]
)
def test_same_tokens(v2_engine: Callable[..., Any], expected: Callable[[str], Any], name: str, case: str) -> None:
    assert CASES[case](Small(v2_engine(VARIANTS[name]))) == expected(case)


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_are_accepted(v2_engine: Callable[..., Any], name: str) -> None:
    """The suite above would pass without drafting."""
    llm = v2_engine(VARIANTS[name])
    before = llm.counts.copy()
    generate(Small(llm, 3, 24), prompts(3), greedy())
    seen = llm.counts - before
    assert 0.04 < seen["accepted"] / seen["drafted"] < 1

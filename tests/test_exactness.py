# SPDX-License-Identifier: Apache-2.0
"""Greedy output equals vLLM's without speculation, token for token, in float32, through real engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import drafter_of
from exactness import CASES, greedy, prompts

pytestmark = pytest.mark.engine

# The variants of early drafting; a case must hold for each. "heads" is filled in by the fixture.
VARIANTS: dict[str, dict[str, Any]] = {
    "middle": {"method": "ppd"},
    "heads": {"method": "ppd", "num_speculative_tokens": 2},
    "exits": {"method": "paradecode", "exit_layer": [1, 2, 4], "gamma": 0.03, "num_speculative_tokens": 5},
    "last": {"method": "ppd", "exit_layer": 5, "num_speculative_tokens": 7, "draft_sample_method": "greedy"},
    "cut-off": {"method": "ppd", "max_drafting_requests": 3, "disable_by_batch_size": 9},
}
QUICK = {("middle", case) for case in CASES} | {
    ("exits", "batch_16"), ("exits", "more_than_fit"), ("exits", "arrivals_and_aborts"), ("exits", "model_length"),
    ("heads", "batch_16"), ("heads", "structured_output"),
    ("last", "batch_16"), ("last", "model_length"),
    ("cut-off", "more_than_fit"),
}  # fmt: skip


@pytest.fixture(scope="module")
def variant(heads_folder: Callable[..., Any]) -> Callable[[str], dict[str, Any]]:
    def get(name: str) -> dict[str, Any]:
        options = dict(VARIANTS[name])
        if name == "heads":
            options["model"] = str(heads_folder(exit_layers=(4,), noise=0.05))
        return options

    return get


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=[] if (name, case) in QUICK else [pytest.mark.full])
        for name in VARIANTS
        for case in CASES
    ],
)
def test_same_tokens(engine: Callable[..., Any], variant: Callable[..., Any], name: str, case: str) -> None:
    expected = CASES[case](engine())
    assert CASES[case](engine(variant(name))) == expected


def test_drafts_were_made_and_deferred(engine: Callable[..., Any]) -> None:
    """The suite above would pass without drafting: it must have drafted, accepted, deferred and fallen back."""
    llm = engine(VARIANTS["middle"])
    counters = drafter_of(llm).counters
    before, accepted_before = counters.values.copy(), llm.counts["accepted"]
    CASES["batch_1"](llm)
    deferred, fallback = (counters.values - before)[:2]
    accepted = llm.counts["accepted"] - accepted_before
    prefill_steps = 1 + 1 + 2  # chunks of the three prompts
    # Besides those, only a request's last token may run in full: nothing is drafted for it.
    assert prefill_steps <= fallback <= prefill_steps + 3
    # Every decode step emits one token beyond what it accepts.
    assert deferred + (fallback - prefill_steps) + accepted == 3 * (40 - 1)
    assert accepted > 0


def test_prefix_cache_hits(engine: Callable[..., Any]) -> None:
    """Hits are as many as without speculation, and what is generated from them is the same."""
    results = []
    for options in (None, VARIANTS["middle"], VARIANTS["exits"]):
        llm = engine(options, enable_prefix_caching=True)
        shared = prompts(1)[0]["prompt_token_ids"][:96]
        requests = [{"prompt_token_ids": [*shared, 5 + i, 9]} for i in range(6)]
        first = llm.generate(requests[:1], greedy(), use_tqdm=False)
        # The whole of the first output is a prefix too, drafted positions included.
        requests.append({"prompt_token_ids": requests[0]["prompt_token_ids"] + list(first[0].outputs[0].token_ids)})
        outputs = llm.generate(requests, greedy(), use_tqdm=False)
        results.append([(list(o.outputs[0].token_ids), o.num_cached_tokens) for o in outputs])
    assert results[1] == results[0]
    assert results[2] == results[0]
    assert results[0][-1][1] >= 128


@pytest.mark.parametrize("name", ["middle", "exits"])
def test_preemption(engine: Callable[..., Any], name: str) -> None:
    """A KV cache too small for the batch: requests are evicted in mid-decode and resumed."""
    small = {"kv_cache_memory_bytes": 12 * 2 * 6 * 2 * 32 * 32 * 4, "enable_prefix_caching": True}
    outputs = []
    for options in (None, VARIANTS[name]):
        llm = engine(options, **small)
        outputs.append(CASES["batch_16"](llm))
        assert llm.counts["preempted"] > 0
    assert outputs[1] == outputs[0]


@pytest.mark.parametrize("name", ["middle", pytest.param("exits", marks=pytest.mark.full)])
def test_compiled(engine: Callable[..., Any], name: str) -> None:
    """The default compilation mode: each stack is compiled by itself."""
    expected = CASES["batch_16"](engine(enforce_eager=False)), CASES["arrivals_and_aborts"](engine(enforce_eager=False))
    llm = engine(VARIANTS[name], enforce_eager=False)
    assert (CASES["batch_16"](llm), CASES["arrivals_and_aborts"](llm)) == expected

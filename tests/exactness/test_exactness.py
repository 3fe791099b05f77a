# SPDX-License-Identifier: Apache-2.0
"""Greedy output equals vLLM's without speculation, token for token, in float32, through
real engines.
"""

import itertools
from typing import Any

import pytest
import torch
from cases import CASES, VARIANTS, after_a_prefix, greedy
from conftest import (
    Factory,
    counting,
    drafter_of,
    full_but,
    results_of,
    start_engine,
)
from tiny import make_model

pytestmark = pytest.mark.engine

# Cases that `make test` runs; `make test-full` runs every case of every variant.
QUICK: dict[str, list[str]] = {
    "middle": [*CASES],
    "heads": ["batch_16", "structured_output"],
    "classifiers": ["batch_16"],
    "early-short": ["batch_16", "arrivals_and_aborts"],
    "last": ["batch_16", "model_length"],
    "exits": ["arrivals_and_aborts"],
    "cp": [*CASES],
    "cp-recurrent": ["batch_1", "batch_16", "arrivals_and_aborts"],
    "cp-layers": ["batch_16", "arrivals_and_aborts"],
    "cp-recurrent-longer": ["model_length", "batch_16"],
    "dynamo-short": ["batch_16"],
    "dynamo": [
        "batch_1",
        "batch_16",
        "structured_output",
        "arrivals_and_aborts",
        "model_length",
        "penalties",
    ],
    "lookup": ["batch_1", "structured_output", "model_length"],
    "lookup-alone": ["batch_16", "arrivals_and_aborts"],
    "lookup-7": ["batch_16"],
    "cp-lookup": ["batch_16"],
    "recurrent": ["batch_16", "arrivals_and_aborts", "structured_output"],
    "recurrent-short": ["batch_16", "model_length", "penalties"],
}
HEADS = [
    name
    for name, options in VARIANTS.items()
    if (options["method"] != "early" or "draft_vocab_size" in options)
    and "prompt_lookup_min" not in options
]
QUICK_PAIRS = {(name, case) for name, cases in QUICK.items() for case in cases}


@pytest.mark.parametrize(
    ("name", "case"), full_but(QUICK_PAIRS, itertools.product(VARIANTS, CASES))
)
def test_same_tokens(
    drafting: Factory, alone: Factory, name: str, case: str
) -> None:
    expected = alone(case)
    llm = drafting(VARIANTS[name])
    with counting(llm) as seen:
        assert CASES[case](llm) == expected
    if name in HEADS and case == "batch_16":
        # Heads fitted to what the model says are right at times, and wrong at times.
        assert 0.1 < seen["accepted"] / seen["drafted"] < 1


@pytest.mark.parametrize(
    "name",
    full_but(
        QUICK,
        ["cp-recurrent-longer", "cp-full-short", "dynamo-short", "early-short"],
    ),
)
def test_draft_vocabulary_is_a_part_of_the_lm_head(
    drafting: Factory, name: str
) -> None:
    """Its logits are those of the whole at its tokens, and nothing else is drafted."""
    llm = drafting(VARIANTS[name])
    speculator = drafter_of(llm)
    hidden = torch.randn(5, 64)
    vocabulary = speculator.drafter.vocabulary
    whole = speculator.target.lm_head.logits(hidden)
    torch.testing.assert_close(
        vocabulary.logits(hidden),
        whole[:, vocabulary.token_ids],
        rtol=0,
        atol=1e-5,
    )
    assert vocabulary.entries(vocabulary.token_ids).tolist() == list(
        range(len(vocabulary.token_ids))
    )
    with results_of(speculator, "propose", torch.Tensor.tolist) as drafted:
        CASES["batch_1"](llm)
    tokens = {token for step in drafted for row in step for token in row}
    # 0 takes the place of an invalid draft
    assert tokens and tokens <= {0, *vocabulary.token_ids.tolist()}


ENGINES = ("middle", "cp", "dynamo")
# Too few blocks for a batch of 16
SMALL: dict[str, Any] = {
    "num_gpu_blocks_override": 24,
    "enable_prefix_caching": True,
}


@pytest.mark.parametrize("name", ENGINES)
def test_prefix_cache_hits(engine: Factory, drafting: Factory, name: str) -> None:
    """Hits are as many as without speculation, and what is generated from them is the same."""
    llm = drafting(VARIANTS[name], **SMALL)
    assert after_a_prefix(llm) == after_a_prefix(engine(**SMALL))


def test_prefix_cache_hits_hold_the_heads_history(drafting: Factory) -> None:
    """DynaMo's drafts after a hit are those without one: the blocks hold the KV of the
    heads' layers, too.
    """
    llm = drafting(VARIANTS["dynamo"], **SMALL)
    assert llm.reset_prefix_cache()
    request = {"prompt_token_ids": [(11 * j + 5) % 250 + 2 for j in range(100)]}
    runs = []
    for expected_hit in (0, 96):
        drafts = results_of(drafter_of(llm), "propose", torch.Tensor.tolist)
        with drafts as drafted:
            output = llm.generate([request], greedy(), use_tqdm=False)[0]
        assert output.num_cached_tokens == expected_hit
        runs.append(
            drafted[-30:]
        )  # those after a chunk of the prompt are nobody's
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", ENGINES)
def test_preemption(alone: Factory, drafting: Factory, name: str) -> None:
    """A KV cache too small for the batch: requests are evicted in mid-decode and resumed."""
    llm = drafting(VARIANTS[name], **SMALL)
    with counting(llm) as seen:
        assert CASES["batch_16"](llm) == alone("batch_16")
    assert seen["preempted"] > 0


def test_compiled_stacks(made_once: Factory) -> None:
    """The default compilation mode: each stack is compiled by itself, before the first request."""
    model = made_once(
        "two layers", lambda folder: make_model(folder, num_hidden_layers=2)
    )
    llm = start_engine(
        model, {"method": "early", "exit_layer": 1}, enforce_eager=False
    )
    assert all(part.compiled for part in drafter_of(llm).target.cut.compiled)
    case = CASES["arrivals_and_aborts"]
    assert case(llm) == case(start_engine(model, None))


@pytest.mark.full
@pytest.mark.parametrize("name", ENGINES)
def test_compiled(alone: Factory, drafting: Factory, name: str) -> None:
    llm = drafting(VARIANTS[name], enforce_eager=False)
    case = "arrivals_and_aborts"
    assert CASES[case](llm) == alone(case)

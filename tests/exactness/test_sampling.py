# SPDX-License-Identifier: Apache-2.0
"""Sampling keeps the target's distribution: chi-square tests over many samples."""

import functools
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import DYNAMO, PLAIN, RECURRENT, generate
from conftest import Factory, counting, full_but, start_engine
from safetensors.torch import load_file, save_file
from scipy.stats import chi2_contingency
from vllm import SamplingParams

pytestmark = pytest.mark.engine
SAMPLES = 3000
TOKENS = 4
PROMPT = {"prompt_token_ids": [7, 40, 3, 99, 12]}


def sample(
    llm: Any, count: int = SAMPLES, **settings: Any
) -> list[tuple[int, ...]]:
    """Many short continuations of one prompt."""
    params = SamplingParams(
        **{
            "temperature": 0.8,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            **settings,
        }
    )
    return [tuple(tokens) for tokens in generate(llm, [PROMPT] * count, params)]


def p_value(first: list[Any], second: list[Any]) -> float:
    """Homogeneity of two samples; outcomes too rare for the test are pooled."""
    counts = [Counter(first), Counter(second)]
    common = [
        key for key, count in (counts[0] + counts[1]).items() if count >= 20
    ]
    rows = []
    for count in counts:
        of_common = [count[key] for key in common]
        rows.append([*of_common, count.total() - sum(of_common)])
    table = np.array(rows)
    table = table[:, table.any(axis=0)]
    return float(chi2_contingency(table).pvalue)


def worst(first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> float:
    """The least p-value over each position's tokens and over pairs of neighbors."""
    singles = [
        p_value([s[i] for s in first], [s[i] for s in second])
        for i in range(TOKENS)
    ]
    pairs = [
        p_value([s[i : i + 2] for s in first], [s[i : i + 2] for s in second])
        for i in range(TOKENS - 1)
    ]
    return min(singles + pairs)


# Seven tests a comparison: at this level a correct sampler fails one comparison in 700.
LEVEL = 2e-4


BATCH: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 512}


@pytest.fixture(scope="module")
def expected(engine: Factory) -> Factory:
    """expected(**settings): samples of vLLM alone."""
    return functools.cache(lambda **settings: sample(engine(**BATCH), **settings))


SHORT = {"draft_vocab_size": 150}
EARLY = {"method": "early", "exit_layer": 5}
GREEDY = {"draft_sample_method": "greedy"}
DRAFTERS: dict[str, dict[str, Any]] = {
    "early": EARLY,
    "early-greedy": EARLY | GREEDY,
    "cp-short": {"method": "cp", "heads": PLAIN, **SHORT},
    "cp-recurrent": {"method": "cp", "heads": RECURRENT, **SHORT},
    "recurrent": {"method": "recurrent", "heads": ("recurrent", {}), **SHORT},
    "dynamo": DYNAMO | {"eps_b": 0.0},
    "dynamo-greedy": DYNAMO | GREEDY,
    "lookups": EARLY | {"prompt_lookup_min": 1, "adaptive": True},
}


LIMITED = [
    (name, True) for name in ("early", "cp-short", "cp-recurrent", "dynamo")
]


@pytest.mark.parametrize(
    ("name", "limited"),
    full_but(
        {("early", True)},
        [(name, False) for name in DRAFTERS] + LIMITED,
    ),
)
def test_distribution(
    drafting: Factory, expected: Factory, name: str, limited: bool
) -> None:
    """Drafts must have been accepted and rejected."""
    limits = {"top_k": 6, "top_p": 0.9} if limited else {}
    llm = drafting(DRAFTERS[name], **BATCH)
    with counting(llm) as seen:
        assert worst(sample(llm, **limits), expected(**limits)) > LEVEL
    assert 20 < seen["accepted"] < 0.98 * seen["drafted"]


def test_a_perfect_drafter_is_accepted(
    tiny_model: Factory, tmp_path: Path
) -> None:
    """A draft is drawn as the target draws: here the last layer changes nothing."""
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    for name, tensor in weights.items():
        if name.startswith("model.layers.5.") and name.endswith(
            ("o_proj.weight", "down_proj.weight")
        ):
            tensor.zero_()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    llm = start_engine(model, EARLY, **BATCH)
    for limits in ({}, {"top_k": 1}):
        with counting(llm) as seen:
            sample(
                llm,
                300,
                max_tokens=9,
                **limits,
            )
        assert seen["drafted"] > 300
        assert seen["accepted"] > 0.99 * seen["drafted"], limits


def test_the_test_can_fail(expected: Factory) -> None:
    """A sampler that forgets the temperature is caught."""
    assert worst(expected(temperature=1.2), expected()) < LEVEL

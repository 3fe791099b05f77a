# SPDX-License-Identifier: Apache-2.0
"""Sampling keeps the target's distribution: chi-square tests against no speculation, over many samples."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overfitted
import pytest
from cases import generate
from conftest import Factory, drafter_of, our_counter, start_engine
from safetensors.torch import load_file, save_file
from scipy.stats import chi2_contingency
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.engine
SAMPLES = 3000
TOKENS = 4
PROMPT = {"prompt_token_ids": [7, 40, 3, 99, 12]}


def sample(llm: Any, count: int = SAMPLES, **settings: Any) -> list[tuple[int, ...]]:
    """Many short continuations of one prompt."""
    params = SamplingParams(**{"temperature": 0.8, "max_tokens": TOKENS, "ignore_eos": True, **settings})
    return [tuple(tokens) for tokens in generate(llm, [PROMPT] * count, params)]


def p_value(first: list[Any], second: list[Any]) -> float:
    """Homogeneity of two samples; outcomes too rare for the test are pooled."""
    counts = [Counter(first), Counter(second)]
    common = [key for key in counts[0] | counts[1] if counts[0][key] + counts[1][key] >= 20]
    table = [
        [count[key] for key in common] + [sum(count.values()) - sum(count[key] for key in common)] for count in counts
    ]
    table = [[row[i] for i in range(len(row)) if table[0][i] + table[1][i] > 0] for row in table]
    return float(chi2_contingency(table).pvalue)


def worst(first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> float:
    """The least p-value over each position's tokens and over pairs of neighbours."""
    singles = [p_value([s[i] for s in first], [s[i] for s in second]) for i in range(TOKENS)]
    pairs = [p_value([s[i : i + 2] for s in first], [s[i : i + 2] for s in second]) for i in range(TOKENS - 1)]
    return min(singles + pairs)


# Seven tests a comparison: at this level a correct sampler fails one comparison in 700.
LEVEL = 2e-4


@pytest.fixture(scope="module")
def expected(engine: Factory) -> list[tuple[int, ...]]:
    return sample(engine(max_num_seqs=64, max_num_batched_tokens=512))


SINGLE, SEVERAL = {"exit_layer": 5}, {"exit_layer": [2, 4], "gamma": 0.05}


@pytest.mark.parametrize(
    ("exits", "method"),
    [
        pytest.param(SINGLE, "greedy", id="one-greedy"),
        pytest.param(SINGLE, "probabilistic", id="one-probabilistic"),
        pytest.param(SEVERAL, "greedy", id="several-greedy", marks=pytest.mark.full),
        pytest.param(SEVERAL, "probabilistic", id="several-probabilistic"),
    ],
)
def test_distribution(engine: Factory, expected: list[tuple[int, ...]], exits: dict[str, Any], method: str) -> None:
    options = {"method": "ppd", "draft_sample_method": method, **exits}
    llm = engine(options, max_num_seqs=64, max_num_batched_tokens=512)
    before = llm.counts.copy()
    assert worst(sample(llm), expected) > LEVEL
    # Both outcomes of the rejection sampler must have been seen.
    seen = llm.counts - before
    assert 0.02 < seen["accepted"] / seen["drafted"] < 0.98


@pytest.mark.parametrize("method", [pytest.param("greedy", marks=pytest.mark.full), "probabilistic"])
def test_distribution_of_the_parallel_schedule(engine: Factory, expected: list[tuple[int, ...]], method: str) -> None:
    """Within a step tokens are coupled to what an exit predicted, some kept and some not; vLLM verifies them again."""
    options = {"method": "paradecode", "schedule": "parallel", "draft_sample_method": method, "exit_layer": [3, 5]}
    llm = engine({**options, "gamma": 0.05}, max_num_seqs=64, max_num_batched_tokens=512)
    before = llm.counts.copy(), our_counter("early_predictions"), our_counter("early_rejections")
    assert worst(sample(llm), expected) > LEVEL
    predicted, rejected = our_counter("early_predictions") - before[1], our_counter("early_rejections") - before[2]
    assert 0.02 < rejected / predicted < 0.98
    seen = llm.counts - before[0]
    # A sample of the final layer is what vLLM's own would be; its best token is not always.
    assert (seen["accepted"] > 0.99 * seen["drafted"]) == (method == "probabilistic")


@pytest.fixture(scope="module")
def heads(
    expected: list[tuple[int, ...]], tiny_model: Factory, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """heads(kind): fitted to the samples themselves; "cp-chain" is CP heads of that condition."""
    made: dict[str, str] = {}
    sequences = [PROMPT["prompt_token_ids"] + list(tokens) for tokens in expected]

    def get(kind: str) -> str:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind) / "heads"
            name, _, condition = kind.partition("-")
            how = {"condition": condition or "none"} if name == "cp" else {}
            made[kind] = str(overfitted.fit(tiny_model(), name, sequences[:1200], folder, **how))
        return made[kind]

    return get


def test_distribution_with_lookups(engine: Factory, expected: list[tuple[int, ...]]) -> None:
    """The prompt is what followed it before: a place that the model's own words may lead back to."""
    llm = engine(
        {"method": "ppd", "exit_layer": 5, "prompt_lookup_min": 1, "prompt_lookup_drafts": 6, "adaptive": True},
        max_num_seqs=64,
        max_num_batched_tokens=512,
    )
    before, steps = llm.counts.copy(), our_counter("lookup_steps")
    assert worst(sample(llm), expected) > LEVEL
    assert our_counter("lookup_steps") > steps
    assert (llm.counts - before)["accepted"] > 50


HEADS = {
    "cp": ("cp", {}),
    "cp-short": ("cp", {"draft_vocab_size": 150}),
    "cp-token": ("cp-token", {}),
    "cp-chain-short": ("cp-chain", {"draft_vocab_size": 150}),
    "dynamo": ("dynamo", {"eps_b": 0.0}),
    "dynamo-backing-off": ("dynamo", {"eps_b": 0.4, "draft_vocab_size": 150}),
}


@pytest.mark.parametrize(
    ("kind", "options", "method"),
    [
        # Greedy drafts differ in nothing but their vocabulary; one kind of each stands for both.
        pytest.param(*HEADS[name], method, id=f"{name}-{method}", marks=[pytest.mark.full] * (method not in methods))
        for name, methods in {
            "cp": ("probabilistic",),
            "cp-short": ("greedy", "probabilistic"),
            "cp-token": ("greedy",),
            "cp-chain-short": ("probabilistic",),
            "dynamo": ("greedy",),
            "dynamo-backing-off": ("probabilistic",),
        }.items()
        for method in ("greedy", "probabilistic")
    ],
)
def test_distribution_with_heads(
    engine: Factory, heads: Factory, expected: list[tuple[int, ...]], kind: str, options: dict[str, Any], method: str
) -> None:
    options = {"method": kind.partition("-")[0], "model": heads(kind), "draft_sample_method": method, **options}
    llm = engine(options, max_num_seqs=64, max_num_batched_tokens=512)
    before = llm.counts.copy()
    assert worst(sample(llm), expected) > LEVEL
    seen = llm.counts - before
    assert 50 < seen["accepted"] < 0.98 * seen["drafted"]


BATCH: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
LIMITS: dict[str, Any] = {"top_k": 6, "top_p": 0.9}


@pytest.fixture(scope="module")
def limited(engine: Factory) -> list[tuple[int, ...]]:
    """Samples of vLLM alone within these limits."""
    return sample(engine(**BATCH), **LIMITS)


@pytest.mark.parametrize("kind", ["ppd", "cp", "cp-chain", "dynamo"])
def test_distribution_with_top_k_and_top_p(
    engine: Factory, heads: Factory, limited: list[tuple[int, ...]], kind: str
) -> None:
    """Drafts and q(x) are cut as the request asks; the output's distribution stays the target's."""
    options = {"exit_layer": 5} if kind == "ppd" else {"model": heads(kind)}
    llm = engine({"method": kind.partition("-")[0], **options}, **BATCH)
    before = llm.counts.copy()
    assert worst(sample(llm, **LIMITS), limited) > LEVEL
    seen = llm.counts - before
    assert 50 < seen["accepted"] < 0.98 * seen["drafted"]


@pytest.fixture(scope="module")
def shallow_model(tiny_model: Factory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a last layer that changes nothing: an exit before it is a perfect drafter."""
    folder = tmp_path_factory.mktemp("shallow") / "model"
    shutil.copytree(tiny_model(), folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.startswith("model.layers.5.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("schedule", ["deferred", "parallel"])
def test_a_perfect_drafter_is_accepted_under_top_k_and_top_p(shallow_model: Path, schedule: str) -> None:
    """q(x) is the target's own distribution, whatever the request cuts off (0.21 at top-k 3 if q ignored it)."""
    options = {"method": "paradecode", "schedule": schedule, "exit_layer": 5}
    llm = start_engine(shallow_model, options, max_num_seqs=64, max_num_batched_tokens=512)
    for limits in ({}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.8}):
        before = llm.counts.copy()
        sample(llm, 300, **limits)
        seen = llm.counts - before
        assert seen["drafted"] > 300
        assert seen["accepted"] > 0.99 * seen["drafted"], limits


def test_drafts_that_a_grammar_may_cut_off_are_greedy(engine: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether such a draft stays depends on which it is, so what stays is not a sample of q(x)."""
    options = {"method": "ppd", "draft_sample_method": "probabilistic", "exit_layer": 5}
    llm = engine(options, max_num_seqs=64, max_num_batched_tokens=512)
    seen: list[list[float]] = []
    drafter = drafter_of(llm).host.drafter
    propose = drafter.propose

    def noted(step: Any) -> Any:
        seen.append(step.sampling.temperature.tolist())
        return propose(step)

    monkeypatch.setattr(drafter, "propose", noted)
    free = SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True)
    letters = StructuredOutputsParams(regex="[a-z]{8}")
    generate(llm, [PROMPT] * 2, [free, SamplingParams(temperature=0.8, max_tokens=8, structured_outputs=letters)])
    assert {tuple(round(each, 3) for each in temperatures) for temperatures in seen if len(temperatures) == 2} == {
        (0.8, 0.0)
    }


def test_the_test_can_fail(engine: Factory, expected: list[tuple[int, ...]]) -> None:
    """A sampler that forgets the temperature is caught."""
    llm = engine(max_num_seqs=64, max_num_batched_tokens=512)
    assert worst(sample(llm, temperature=1.2), expected) < LEVEL

# SPDX-License-Identifier: Apache-2.0
"""Sampling keeps the target's distribution: chi-square tests against no speculation, over many samples."""

import functools
import itertools
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overfitted
import pytest
from cases import generate
from conftest import Factory, counting, drafter_of, full_but, start_engine
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


BATCH: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
LIMITS: dict[str, Any] = {"top_k": 6, "top_p": 0.9}


@pytest.fixture(scope="module")
def expected(engine: Factory) -> list[tuple[int, ...]]:
    """Samples of vLLM alone."""
    return sample(engine(**BATCH))


@pytest.fixture(scope="module")
def limited(engine: Factory) -> list[tuple[int, ...]]:
    """Samples of vLLM alone within LIMITS."""
    return sample(engine(**BATCH), **LIMITS)


@pytest.fixture(scope="module")
def heads(
    expected: list[tuple[int, ...]], tiny_model: Factory, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """heads(kind): fitted to the samples themselves; "cp-chain" is CP heads of that condition."""
    sequences = [PROMPT["prompt_token_ids"] + list(tokens) for tokens in expected]

    @functools.cache
    def get(kind: str) -> str:
        folder = tmp_path_factory.mktemp(kind) / "heads"
        name, _, condition = kind.partition("-")
        how = {"condition": condition or "none", "expert_rank": 4} if name == "cp" else {}
        return str(overfitted.fit(tiny_model(), name, sequences[:1200], folder, **how))

    return get


# The kind of heads that is filled in as the model, options, and how drafts are drawn where that is not run in full
# alone: greedy drafts of heads differ in nothing but their vocabulary, and a kind of each stands for both.
DRAFTERS: dict[str, tuple[str | None, dict[str, Any], tuple[str, ...]]] = {
    "early": (None, {"method": "ppd", "exit_layer": 5}, ("greedy", "probabilistic")),
    "several-exits": (None, {"method": "ppd", "exit_layer": [2, 4], "gamma": 0.05}, ("probabilistic",)),
    "cp": ("cp", {}, ("probabilistic",)),
    "cp-short": ("cp", {"draft_vocab_size": 150}, ("greedy", "probabilistic")),
    "cp-token": ("cp-token", {}, ("greedy",)),
    "cp-chain": ("cp-chain", {}, ()),
    "cp-chain-short": ("cp-chain", {"draft_vocab_size": 150}, ("probabilistic",)),
    "cp-recurrent": ("cp-recurrent", {"draft_vocab_size": 150}, ("probabilistic",)),
    "recurrent": ("recurrent", {"draft_vocab_size": 150}, ("probabilistic",)),
    "dynamo": ("dynamo", {"eps_b": 0.0}, ("greedy",)),
    "dynamo-backing-off": ("dynamo", {"eps_b": 0.4, "draft_vocab_size": 150}, ("probabilistic",)),
}


@pytest.fixture(scope="module")
def drafting(engine: Factory, heads: Factory) -> Factory:
    """drafting(name, method): an engine with one of DRAFTERS, and how it draws drafts."""

    def get(name: str, method: str = "probabilistic") -> Any:
        kind, options, _ = DRAFTERS[name]
        model = {} if kind is None else {"model": heads(kind)}
        return engine({"draft_sample_method": method, **options, **model}, **BATCH)

    return get


@pytest.mark.parametrize(
    ("name", "method"),
    full_but(
        {(name, method) for name, (_, _, quick) in DRAFTERS.items() for method in quick},
        itertools.product(DRAFTERS, ("greedy", "probabilistic")),
    ),
)
def test_distribution(drafting: Factory, expected: list[tuple[int, ...]], name: str, method: str) -> None:
    """Both outcomes of the rejection sampler must have been seen."""
    llm = drafting(name, method)
    with counting(llm) as seen:
        assert worst(sample(llm), expected) > LEVEL
    assert 20 < seen["accepted"] < 0.98 * seen["drafted"]


@pytest.mark.parametrize("name", ["early", "cp", "cp-chain", "cp-recurrent", "dynamo"])
def test_distribution_with_top_k_and_top_p(drafting: Factory, limited: list[tuple[int, ...]], name: str) -> None:
    """Drafts and q(x) are cut as the request asks; the output's distribution stays the target's."""
    llm = drafting(name)
    with counting(llm) as seen:
        assert worst(sample(llm, **LIMITS), limited) > LEVEL
    assert 20 < seen["accepted"] < 0.98 * seen["drafted"]


@pytest.mark.parametrize("method", [pytest.param("greedy", marks=pytest.mark.full), "probabilistic"])
def test_distribution_of_the_parallel_schedule(engine: Factory, expected: list[tuple[int, ...]], method: str) -> None:
    """Within a step tokens are coupled to what an exit predicted, some kept and some not; vLLM verifies them again."""
    options = {"method": "paradecode", "schedule": "parallel", "draft_sample_method": method, "exit_layer": [3, 5]}
    llm = engine({**options, "gamma": 0.05}, **BATCH)
    with counting(llm) as seen:
        assert worst(sample(llm), expected) > LEVEL
    assert 0.02 < seen["early_rejections"] / seen["early_predictions"] < 0.98
    # A sample of the final layer is what vLLM's own would be; its best token is not always.
    assert (seen["accepted"] > 0.99 * seen["drafted"]) == (method == "probabilistic")


def test_distribution_with_lookups(engine: Factory, expected: list[tuple[int, ...]]) -> None:
    """The prompt is what followed it before: a place that the model's own words may lead back to."""
    llm = engine({"method": "ppd", "exit_layer": 5, "prompt_lookup_min": 1, "adaptive": True}, **BATCH)
    with counting(llm) as seen:
        assert worst(sample(llm), expected) > LEVEL
    assert seen["lookup_steps"] > 0 and seen["accepted"] > 50


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
    llm = start_engine(shallow_model, options, **BATCH)
    for limits in ({}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.8}):
        with counting(llm) as seen:
            sample(llm, 300, **limits)
        assert seen["drafted"] > 300
        assert seen["accepted"] > 0.99 * seen["drafted"], limits


def test_drafts_that_a_grammar_may_cut_off_are_greedy(engine: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether such a draft stays depends on which it is, so what stays is not a sample of q(x)."""
    options = {"method": "ppd", "draft_sample_method": "probabilistic", "exit_layer": 5}
    llm = engine(options, **BATCH)
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
    llm = engine(**BATCH)
    assert worst(sample(llm, temperature=1.2), expected) < LEVEL

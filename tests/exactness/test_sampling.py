# SPDX-License-Identifier: Apache-2.0
"""Sampling keeps the target's distribution: chi-square tests over many samples."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cases import generate
from conftest import ROOT, Factory, counting, full_but, start_engine
from safetensors.torch import load_file, save_file
from scipy.stats import chi2_contingency
from vllm import SamplingParams

pytestmark = pytest.mark.engine
SAMPLES = 3000
TOKENS = 4
PROMPT = {"prompt_token_ids": [7, 40, 3, 99, 12]}


def sample(llm: Any, count: int = SAMPLES, **settings: Any) -> list[tuple[int, ...]]:
    """Many short continuations of one prompt."""
    params = SamplingParams(
        **{"temperature": 0.8, "max_tokens": TOKENS, "ignore_eos": True, **settings}
    )
    return [tuple(tokens) for tokens in generate(llm, [PROMPT] * count, params)]


def p_value(first: list[Any], second: list[Any]) -> float:
    """Homogeneity of two samples; outcomes too rare for the test are pooled."""
    counts = [Counter(first), Counter(second)]
    common = [
        key for key in counts[0] | counts[1] if counts[0][key] + counts[1][key] >= 20
    ]
    table = [
        [count[key] for key in common]
        + [sum(count.values()) - sum(count[key] for key in common)]
        for count in counts
    ]
    table = [
        [row[i] for i in range(len(row)) if table[0][i] + table[1][i] > 0]
        for row in table
    ]
    return float(chi2_contingency(table).pvalue)


def worst(first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> float:
    """The least p-value over each position's tokens and over pairs of neighbours."""
    singles = [
        p_value([s[i] for s in first], [s[i] for s in second]) for i in range(TOKENS)
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
def expected(engine: Factory) -> list[tuple[int, ...]]:
    """Samples of vLLM alone."""
    return sample(engine(**BATCH))


SHORT = {"draft_vocab_size": 150}
RECURRENT = {"condition": "recurrent", "expert_rank": 4}
DRAFTERS: dict[str, dict[str, Any]] = {
    "early": {"method": "ppd", "exit_layer": 5},
    "early-greedy": {"method": "ppd", "exit_layer": 5, "draft_sample_method": "greedy"},
    "cp-short": {"method": "cp", "heads": ("cp", {"condition": "none"}), **SHORT},
    "cp-recurrent": {"method": "cp", "heads": ("cp", RECURRENT), **SHORT},
    "recurrent": {"method": "recurrent", "heads": ("recurrent", {}), **SHORT},
    "dynamo": {"method": "dynamo", "eps_b": 0.0, "heads": ("dynamo", {})},
    "dynamo-greedy": {
        "method": "dynamo",
        "heads": ("dynamo", {}),
        "draft_sample_method": "greedy",
    },
    "lookups": {
        "method": "ppd",
        "exit_layer": 5,
        "prompt_lookup_min": 1,
        "adaptive": True,
    },
}


@pytest.mark.parametrize("name", full_but({"early", "recurrent"}, DRAFTERS))
def test_distribution(
    drafting: Factory, expected: list[tuple[int, ...]], name: str
) -> None:
    """Drafts must have been accepted and rejected."""
    llm = drafting(DRAFTERS[name], **BATCH)
    with counting(llm) as seen:
        assert worst(sample(llm), expected) > LEVEL
    assert 20 < seen["accepted"] < 0.98 * seen["drafted"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["early", "cp-short", "cp-recurrent", "dynamo"])
def test_distribution_with_top_k_and_top_p(
    engine: Factory, drafting: Factory, name: str
) -> None:
    """Drafts are cut as the request asks; the output's distribution stays the target's."""
    limits = {"top_k": 6, "top_p": 0.9}
    llm = drafting(DRAFTERS[name], **BATCH)
    with counting(llm) as seen:
        assert worst(sample(llm, **limits), sample(engine(**BATCH), **limits)) > LEVEL
    assert 20 < seen["accepted"] < 0.98 * seen["drafted"]


def test_a_perfect_drafter_is_accepted(tiny_model: Factory, tmp_path: Path) -> None:
    """A draft is drawn as the target draws: here the last layer changes nothing."""
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    for name, tensor in weights.items():
        if name.startswith("model.layers.5.") and name.endswith(
            ("o_proj.weight", "down_proj.weight")
        ):
            tensor.zero_()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    llm = start_engine(model, {"method": "ppd", "exit_layer": 5}, **BATCH)
    for limits in ({}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.8}):
        with counting(llm) as seen:
            sample(llm, 300, max_tokens=9, **limits)
        assert seen["drafted"] > 300
        assert seen["accepted"] > 0.99 * seen["drafted"], limits


def test_the_test_can_fail(engine: Factory, expected: list[tuple[int, ...]]) -> None:
    """A sampler that forgets the temperature is caught."""
    assert worst(sample(engine(**BATCH), temperature=1.2), expected) < LEVEL


# vLLM registers no kernels any more in a process in which numba, of its n-grams, has compiled.
NGRAMS = """
import sys, torch
from cases import generate, greedy, prompts
from conftest import counting, runner_of, start_engine
from test_sampling import BATCH, LEVEL, PROMPT, sample, worst
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens
from vllm_ppd.vllm_plugins.engine.cpu.workarounds import mend_workers_to_come

def is_right(values):
    ends = torch.tensor([2, 2, 3], dtype=torch.int32)
    spread = expand_batch_to_tokens(torch.tensor(values), ends, 3, 0, 1)
    return spread.tolist() == [values[0] or 1, values[0] or 1, values[2]]

model = sys.argv[1]
options = {"method": "ngram", "num_speculative_tokens": 3}
options |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
ours = start_engine(model, {"method": "ppd", "exit_layer": 3}, **BATCH)
alone = start_engine(model, None, **BATCH)
assert not is_right([0.25, 0.0, 0.75]), "vLLM's kernel needs no mending"
mend_workers_to_come()
ngrams = start_engine(model, options, **BATCH)  # its worker registers vLLM's kernels again
assert is_right([0.25, 0.0, 0.75]) and is_right([0.0, 5.0, 9.0])
assert type(runner_of(ngrams)).__module__ == "vllm.v1.worker.cpu_model_runner"
assert generate(ngrams, prompts(4), greedy()) == generate(ours, prompts(4), greedy())
with counting(ngrams) as seen:
    # Among the prompt's own tokens each has a match.
    allowed = {"allowed_token_ids": PROMPT["prompt_token_ids"]}
    assert worst(sample(ngrams, 1500, **allowed), sample(alone, 1500, **allowed)) > LEVEL
assert seen["accepted"] > 50, seen
print("same", flush=True)
"""


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="of vLLM's CPU backend")
def test_vllms_own_n_grams_keep_the_distribution_once_mended(
    tiny_model: Factory,
) -> None:
    """vLLM's CPU backend drops sampling parameters of drafts, unless its kernel is replaced."""
    paths = os.pathsep.join(
        [
            str(ROOT / "tests"),
            str(ROOT / "tests" / "exactness"),
            os.environ.get("PYTHONPATH", ""),
        ]
    )
    command = [sys.executable, "-c", NGRAMS, str(tiny_model())]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert run.stdout.endswith("same\n"), run.stdout[-3000:] + run.stderr[-3000:]

# SPDX-License-Identifier: Apache-2.0
"""DynaMo's own decoding (verify: false): n-grams whose first token the target samples."""

import functools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CASES, SCHEMA, generate, greedy, prompts
from conftest import Factory, counting, drafter_of
from methods import METHODS
from test_sampling import LEVEL, PROMPT, p_value, sample
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from vllm_ppd.heads.calibration.text import logits_at
from vllm_ppd.heads.dynamo.calibration import head_states
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.joint import JointChoice, candidates
from vllm_ppd.heads.dynamo.module import DynaMoHeads
from vllm_ppd.heads.dynamo.recipe import new_layers
from vllm_ppd.heads.io import load_tensors
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

pytestmark = pytest.mark.engine
MANY = {"max_num_seqs": 64, "max_num_batched_tokens": 512}


@pytest.fixture(scope="module")
def unverified(drafting: Factory) -> Any:
    return drafting({**METHODS["dynamo"], "verify": False}, **MANY)


def with_eps(eps_b: float, **settings: Any) -> SamplingParams:
    return greedy(**settings, extra_args={"ppd_eps_b": eps_b})


@pytest.mark.parametrize("case", ["batch_16", "model_length", "arrivals_and_aborts"])
def test_full_back_off_is_ordinary_decoding(
    drafting: Factory, alone: Factory, case: str
) -> None:
    llm = drafting({**METHODS["dynamo"], "verify": False, "eps_b": 1.0})
    with counting(llm) as seen:
        assert CASES[case](llm) == alone(case)
    assert not seen["unverified_tokens"]


@functools.cache
def loaded(model: Path, folder: str) -> tuple[Any, Target, DynaMoHeads, Any]:
    """Heads with their target and counts."""
    config, tensors = load_tensors(folder)
    target = Target(str(model), torch.device("cpu"), torch.float32)
    heads = DynaMoHeads(new_layers(target, config.tokens))  # type: ignore[attr-defined]
    heads.load(tensors)
    return config, target, heads, CoOccurrence.from_tensors(tensors)


def choices_along(
    model: Path, folder: str, tokens: list[int], eps_b: float
) -> JointChoice:
    """Algorithm 1 at every position of a sequence, given the token that follows, by
    transformers without a cache.
    """
    config, target, heads, counts = loaded(model, folder)
    batch = Batch(torch.tensor([tokens]), torch.arange(len(tokens))[None])
    calibration: Any = SimpleNamespace(target=target, autocast=torch.no_grad)
    log_probs = [
        logits_at(target, states, 0.0).log_softmax(-1)
        for states in head_states(calibration, heads, batch)
    ]
    settings = config.sampling.model_copy(update={"eps_b": eps_b})
    first_token = torch.tensor([*tokens[1:], 0])
    return candidates(
        log_probs[1:], settings, counts and counts.ngrams, first_token
    ).back_off(settings)


@pytest.mark.parametrize("eps_b", [0.0, 0.2])
def test_n_grams_are_those_of_algorithm_1(
    unverified: Any, tiny_model: Factory, eps_b: float
) -> None:
    """Greedy: each n-gram is the likeliest of the joint, given its first token, which
    the target samples.
    """
    requests = prompts(4)
    heads = drafter_of(unverified).config.model
    with counting(unverified) as seen:
        outputs = generate(unverified, requests, with_eps(eps_b))
    several = 0
    for request, output in zip(requests, outputs, strict=True):
        prompt = request["prompt_token_ids"]
        choice = choices_along(tiny_model(), heads, prompt + output, eps_b)
        best = choice.likeliest.tokens
        at = 0
        while at < len(output):
            place = len(prompt) + at - 1
            order = min(int(choice.order[place]), len(output) - at)
            assert output[at : at + order] == best[place, :order].tolist()
            several += order - 1
            at += order
    assert several > 10
    # Some lie beyond a request's end
    assert several <= seen["unverified_tokens"] <= several + 3 * len(requests)


def test_n_grams_are_sampled_from_the_joint(
    unverified: Any, tiny_model: Factory
) -> None:
    """The first token follows the target's distribution, the second the joint's, given
    the first.
    """
    samples = [
        s[:2]
        for s in sample(
            unverified, 1000, temperature=1.0, extra_args={"ppd_eps_b": 0.0}
        )
    ]
    target = Target(str(tiny_model()), torch.device("cpu"), torch.float32)
    prompt = PROMPT["prompt_token_ids"]
    heads = drafter_of(unverified).config.model
    torch.manual_seed(0)

    def target_samples(tokens: list[int], count: int) -> list[int]:
        with torch.no_grad():
            logits = target.model(torch.tensor([tokens])).logits[0, -1]
        return logits.softmax(-1).multinomial(count, replacement=True).tolist()

    first = Counter(target_samples(prompt, 4000))
    pairs = []
    for token, count in first.items():
        choice = choices_along(tiny_model(), heads, [*prompt, token], 0.0)
        place = len(prompt) - 1
        order = int(choice.order[place])
        if order == 1:  # every pair is masked
            second = target_samples([*prompt, token], count)
        else:
            ids = choice.top.token_ids[1][place]
            joint = choice.joints[order - 1][place][0].reshape(len(ids), -1).sum(dim=1)
            second = ids[joint.multinomial(count, replacement=True)].tolist()
        pairs += [(token, other) for other in second]
    assert p_value(samples, pairs) > LEVEL


def test_single_tokens_where_a_request_needs_them(
    unverified: Any, engine: Factory
) -> None:
    settings = [
        greedy(repetition_penalty=1.3),
        greedy(min_tokens=12, ignore_eos=False),
        greedy(allowed_token_ids=list(range(2, 120))),
        SamplingParams(temperature=0.8, seed=7, max_tokens=20, ignore_eos=True),
        greedy(extra_args={"ppd_draft": False}),
    ]
    expected = generate(engine(on_v2=True, **MANY), prompts(5), settings)
    assert generate(unverified, prompts(5), settings) == expected
    free = unverified.generate(prompts(2), greedy(logprobs=2), use_tqdm=False)
    assert all(len(output.outputs[0].logprobs) == 40 for output in free)


def test_a_request_that_comes_in_with_a_single_token(
    unverified: Any, engine: Factory
) -> None:
    """vLLM gives it places for drafts, and the step more than one logit of it."""

    def tokens(llm: Any) -> dict[str, list[int]]:
        finished = {}
        requests = {"first": prompts(1)[0], "then": {"prompt_token_ids": [33]}}
        for name, request in requests.items():
            llm.llm_engine.add_request(name, request, with_eps(1.0))
            for _ in range(3):
                llm.llm_engine.step()
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
        return finished

    assert tokens(unverified) == tokens(engine())


def test_structured_output_is_refused(unverified: Any) -> None:
    params = greedy(structured_outputs=StructuredOutputsParams(json=SCHEMA))
    with pytest.raises(
        VLLMValidationError, match="structured outputs need verified tokens"
    ):
        unverified.generate(prompts(1), params, use_tqdm=False)

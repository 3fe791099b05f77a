# SPDX-License-Identifier: Apache-2.0
"""DynaMo's own decoding on runner V2 (verify: false): n-grams whose first token the target samples."""

from collections import Counter
from typing import Any

import pytest
import torch
from cases import SCHEMA, generate, greedy, prompts
from conftest import DEMO, Factory, counting
from small import METHODS
from test_sampling import LEVEL, PROMPT, p_value, sample
from test_unverified import choices_along, with_eps
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from vllm_ppd.heads.training.target import Target

pytestmark = pytest.mark.engine
HEADS = METHODS["dynamo"]["model"]
MANY = {"max_num_seqs": 64, "max_num_batched_tokens": 512}


@pytest.fixture(scope="module")
def unverified(v2_engine: Factory) -> Any:
    return v2_engine({"method": "dynamo", "model": HEADS, "verify": False, "eps_b": 0.1}, **MANY)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_full_back_off_is_ordinary_decoding(v2_engine: Factory, asynchronous: bool) -> None:
    llm = v2_engine({"method": "dynamo", "model": HEADS, "verify": False, "eps_b": 1.0}, asynchronous)
    params = [greedy(32), greedy(24), greedy(32, temperature=0.8, seed=3)]
    with counting(llm) as seen:
        assert generate(llm, prompts(3), params) == generate(v2_engine(), prompts(3), params)
    assert not seen["unverified_tokens"]


@pytest.mark.parametrize("eps_b", [0.0, 0.2])
def test_n_grams_are_those_of_algorithm_1(unverified: Any, eps_b: float) -> None:
    """Greedy: each n-gram is the likeliest of the joint, given its first token, which the target samples."""
    requests = prompts(4)
    with counting(unverified) as seen:
        outputs = generate(unverified, requests, with_eps(eps_b))
    several = 0
    for request, output in zip(requests, outputs, strict=True):
        prompt = request["prompt_token_ids"]
        choice = choices_along(DEMO, HEADS, prompt + output, eps_b, given_first=True)
        best = choice.likeliest.tokens
        at = 0
        while at < len(output):
            place = len(prompt) + at - 1
            order = min(int(choice.order[place]), len(output) - at)
            assert output[at : at + order] == best[place, :order].tolist()
            several += order - 1
            at += order
    assert several > 10
    assert several <= seen["unverified_tokens"] <= several + 3 * len(requests)  # some lie beyond a request's end


def test_n_grams_are_sampled_from_the_joint(unverified: Any) -> None:
    """The first token follows the target's distribution, the second the joint's, given the first."""
    samples = [s[:2] for s in sample(unverified, 1000, temperature=1.0, extra_args={"ppd_eps_b": 0.0})]
    target = Target(str(DEMO), torch.device("cpu"), torch.float32)
    prompt = PROMPT["prompt_token_ids"]
    torch.manual_seed(0)

    def target_samples(tokens: list[int], count: int) -> list[int]:
        with torch.no_grad():
            logits = target.model(torch.tensor([tokens])).logits[0, -1]
        return logits.softmax(-1).multinomial(count, replacement=True).tolist()

    first = Counter(target_samples(prompt, 4000))
    pairs = []
    for token, count in first.items():
        choice = choices_along(DEMO, HEADS, [*prompt, token], 0.0, given_first=True)
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


def test_single_tokens_where_a_request_needs_them(unverified: Any, v2_engine: Factory) -> None:
    settings = [
        greedy(repetition_penalty=1.3),
        greedy(min_tokens=12, ignore_eos=False),
        greedy(allowed_token_ids=list(range(2, 120))),
        SamplingParams(temperature=0.8, seed=7, max_tokens=20, ignore_eos=True),
        greedy(extra_args={"ppd_draft": False}),
    ]
    expected = generate(v2_engine(**MANY), prompts(5), settings)
    assert generate(unverified, prompts(5), settings) == expected
    free = unverified.generate(prompts(2), greedy(logprobs=2), use_tqdm=False)
    assert all(len(output.outputs[0].logprobs) == 40 for output in free)


def test_structured_output_is_refused(unverified: Any) -> None:
    params = greedy(structured_outputs=StructuredOutputsParams(json=SCHEMA))
    with pytest.raises(VLLMValidationError, match="structured outputs need verified tokens"):
        unverified.generate(prompts(1), params, use_tqdm=False)

# SPDX-License-Identifier: Apache-2.0
"""DynaMo's own decoding (verify: false): Algorithm 1 as the paper has it, and ordinary sampling where it backs off."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, SCHEMA, generate, greedy, prompts
from conftest import Factory, drafter_of
from test_sampling import LEVEL, PROMPT, p_value, sample, worst
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.joint import JointChoice, candidates
from vllm_ppd.heads.dynamo.measures import DynaMoMeasures
from vllm_ppd.heads.dynamo.module import DynaMoHeads
from vllm_ppd.heads.dynamo.recipe import new_layers
from vllm_ppd.heads.io import load_tensors
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def unverified(engine: Factory, fitted_heads: Factory) -> Any:
    options = {"method": "dynamo", "model": fitted_heads("dynamo"), "verify": False, "eps_b": 0.1}
    return engine(options, max_num_seqs=64, max_num_batched_tokens=512)


def with_eps(eps_b: float, **settings: Any) -> SamplingParams:
    return greedy(**settings, extra_args={"ppd_eps_b": eps_b})


@pytest.mark.parametrize("case", ["batch_16", "more_than_fit", "model_length", "arrivals_and_aborts", "stop_strings"])
def test_full_back_off_is_ordinary_decoding(engine: Factory, alone: Factory, fitted_heads: Factory, case: str) -> None:
    llm = engine({"method": "dynamo", "model": fitted_heads("dynamo"), "verify": False, "eps_b": 1.0})
    assert CASES[case](llm) == alone(case)
    assert drafter_of(llm).host.drafter.states.abs().sum() > 0  # the heads ran


@pytest.mark.full
def test_full_back_off_is_ordinary_sampling(unverified: Any, engine: Factory) -> None:
    expected = sample(engine(max_num_seqs=64, max_num_batched_tokens=512), 1500)
    assert worst(sample(unverified, 1000, extra_args={"ppd_eps_b": 1.0}), expected) > LEVEL
    # and without it the distribution is another: the heads of a random model are no good
    assert worst(sample(unverified, 500, extra_args={"ppd_eps_b": 0.0}), expected) < LEVEL


def choices_along(model: Path, folder: str, tokens: list[int], eps_b: float, given_first: bool = False) -> JointChoice:
    """Algorithm 1 at every position of a sequence, by transformers and without a cache.

    With given_first, the joint is conditioned on the token that follows each position.
    """
    config, tensors = load_tensors(folder)
    target = Target(str(model), torch.device("cpu"), torch.float32)
    heads = DynaMoHeads(new_layers(target, config.tokens))  # type: ignore[attr-defined]
    heads.load(tensors)
    measures = DynaMoMeasures(target, heads, None, torch.no_grad)
    batch = Batch(torch.tensor([tokens]), torch.arange(len(tokens))[None])
    log_probs = [measures.log_probs(states) for states in measures.states(batch)]
    settings = config.sampling.model_copy(update={"eps_b": eps_b})  # type: ignore[attr-defined]
    counts = CoOccurrence.from_tensors(tensors)
    first_token = None
    if given_first:
        log_probs = log_probs[1:]
        first_token = torch.tensor([*tokens[1:], 0])
    return candidates(log_probs, settings, counts and counts.ngrams, first_token).back_off(settings)


@pytest.mark.parametrize("eps_b", [0.0, 0.2])
def test_n_grams_are_those_of_algorithm_1(
    unverified: Any, tiny_model: Factory, fitted_heads: Factory, eps_b: float
) -> None:
    """Greedy: what was emitted, cut into n-grams from the front, is the best of the joint at each one's start."""
    requests = prompts(4)
    outputs = generate(unverified, requests, with_eps(eps_b))
    several = 0
    for request, output in zip(requests, outputs, strict=True):
        prompt = request["prompt_token_ids"]
        choice = choices_along(tiny_model(), fitted_heads("dynamo"), prompt + output, eps_b)
        best, at = choice.likeliest.tokens, 0
        while at < len(output) - 1:  # with room for one token only, the target's own is taken
            place = len(prompt) + at - 1
            order = min(int(choice.order[place]), len(output) - at)
            # A unigram is the target's own token, which head 1 of the joint gives too.
            assert output[at : at + order] == best[place, :order].tolist()
            several += order > 1
            at += order
        assert len(output) == 40
    assert several > 10


def test_n_grams_are_sampled_from_the_joint(unverified: Any, tiny_model: Factory) -> None:
    """The first two tokens of many samples follow the joint's own marginal, not the target's distribution."""
    samples = [s[:2] for s in sample(unverified, 1000, temperature=1.0, extra_args={"ppd_eps_b": 0.0})]
    choice = choices_along(tiny_model(), drafter_of(unverified).config.model, PROMPT["prompt_token_ids"], 0.0)
    assert int(choice.order[-1]) == 3
    first, second, _ = (ids[-1].tolist() for ids in choice.top.token_ids)
    assert set(samples) <= {(a, b) for a in first for b in second}
    torch.manual_seed(0)
    drawn = choice.joints[2][-1].sum(dim=-1).flatten().multinomial(4000, replacement=True).tolist()
    assert p_value(samples, [(first[i // len(second)], second[i % len(second)]) for i in drawn]) > LEVEL


def test_single_tokens_where_a_request_needs_them(unverified: Any, engine: Factory) -> None:
    settings = [
        greedy(repetition_penalty=1.3),
        greedy(min_tokens=12, ignore_eos=False),
        greedy(allowed_token_ids=list(range(2, 120))),
    ]
    assert generate(unverified, prompts(3), settings) == generate(engine(), prompts(3), settings)
    # By itself: vLLM's CPU runner cannot rewind a seed after a chunk of a prompt.
    seeded = SamplingParams(temperature=0.8, seed=7, max_tokens=20, ignore_eos=True)
    assert generate(unverified, prompts(4)[:1], seeded) == generate(engine(), prompts(4)[:1], seeded)
    free = unverified.generate(prompts(2), greedy(logprobs=2), use_tqdm=False)
    assert all(len(output.outputs[0].logprobs) == 40 for output in free)


def test_a_request_that_comes_in_with_a_single_token(unverified: Any, engine: Factory) -> None:
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
    with pytest.raises(VLLMValidationError, match="structured outputs need verified tokens"):
        unverified.generate(prompts(1), params, use_tqdm=False)

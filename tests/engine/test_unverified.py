# SPDX-License-Identifier: Apache-2.0
"""DynaMo's own decoding (verify: false): n-grams whose first token the target samples."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CASES, SCHEMA, generate, greedy, prompts
from conftest import Factory, counting, drafter_of
from methods import METHODS
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from vllm_ppd.heads.calibration.acceptance import logits_at
from vllm_ppd.heads.dynamo.calibration import head_states
from vllm_ppd.heads.dynamo.config import DynaMoConfig
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.joint import JointChoice, candidates
from vllm_ppd.heads.dynamo.mask import LearnedMask
from vllm_ppd.heads.dynamo.recipe import DynaMoHeads, new_layers
from vllm_ppd.heads.folder import load_tensors
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

pytestmark = pytest.mark.engine
MANY = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
UNVERIFIED = METHODS["dynamo"] | {"verify": False}


@pytest.fixture(scope="module")
def unverified(drafting: Factory) -> Any:
    return drafting(UNVERIFIED, **MANY)


def with_eps(eps_b: float) -> SamplingParams:
    return greedy(extra_args={"ppd_eps_b": eps_b})


@pytest.mark.parametrize(
    "case", ["batch_16", "model_length", "arrivals_and_aborts"]
)
def test_full_back_off_is_ordinary_decoding(
    drafting: Factory,
    alone: Factory,
    case: str,
) -> None:
    llm = drafting(UNVERIFIED | {"eps_b": 1.0})
    with counting(llm) as seen:
        assert CASES[case](llm) == alone(case)
    assert not seen["unverified_tokens"]


def choices_along(
    model: Path,
    folder: str,
    tokens: list[int],
    eps_b: float,
) -> JointChoice:
    """Algorithm 1 at every position of a sequence, given the token that follows, by
    transformers without a cache.
    """
    config, tensors = load_tensors(folder, DynaMoConfig)
    target = Target(str(model), torch.device("cpu"), torch.float32)
    heads = DynaMoHeads(new_layers(target, config.tokens))
    heads.load_state_dict({name: tensors[name] for name in heads.state_dict()})
    batch = Batch(torch.tensor([tokens]), torch.arange(len(tokens))[None])
    calibration: Any = SimpleNamespace(target=target, autocast=torch.no_grad)
    _, *states = head_states(calibration, heads, batch)
    first_token = torch.tensor([*tokens[1:], 0])
    mask = LearnedMask(tensors)
    masked = mask.masked(torch.stack(states), target.embed(first_token))
    counts = CoOccurrence.from_tensors(tensors)
    joint = candidates(
        logits_at(target, masked, 0.0),
        config.sampling.k,
        counts and counts.ngrams,
        first_token,
        tables=mask.tables(
            torch.arange(target.vocab_size),
            target.embed,
            lambda rows: logits_at(target, rows, 0.0),
        ),
    )
    return joint.back_off(torch.full((len(tokens),), eps_b))


@torch.no_grad()
@pytest.mark.parametrize("eps_b", [0.0, 0.2])
def test_n_grams_are_those_of_algorithm_1(
    unverified: Any,
    tiny_model: Factory,
    eps_b: float,
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
        choice = choices_along(
            tiny_model(),
            heads,
            prompt + output,
            eps_b,
        )
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


def test_single_tokens_where_a_request_needs_them(
    unverified: Any, engine: Factory
) -> None:
    settings = [
        greedy(repetition_penalty=1.3),
        greedy(min_tokens=12, ignore_eos=False),
        greedy(allowed_token_ids=list(range(2, 120))),
        greedy(20, temperature=0.8, seed=7),
        greedy(extra_args={"ppd_draft": False}),
        with_eps(1.0),
    ]
    # vLLM gives a request that comes in with a single token places for drafts, and the
    # step more than one logit of it.
    requests = [*prompts(5), {"prompt_token_ids": [33]}]
    expected = generate(engine(on_v2=True, **MANY), requests, settings)
    assert generate(unverified, requests, settings) == expected
    free = unverified.generate(prompts(2), greedy(logprobs=2), use_tqdm=False)
    assert all(len(output.outputs[0].logprobs) == 40 for output in free)


def test_structured_output_is_refused(unverified: Any) -> None:
    params = greedy(structured_outputs=StructuredOutputsParams(json=SCHEMA))
    refusal = "structured_outputs needs verified tokens"
    with pytest.raises(VLLMValidationError, match=refusal):
        generate(unverified, prompts(1), params)

# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters, some of which vLLM refuses with drafts, and its custom logits
processors: output is that of vLLM alone, and drafts are accepted.
"""

from itertools import pairwise
from operator import ne
from typing import Any

import pytest
import torch
from cases import generate, greedy, in_turn, prompts
from conftest import Factory, accepting, full_but, runner_of
from methods import METHODS
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
)

pytestmark = pytest.mark.engine
LOW = {"temperature": 0.7}
SETTINGS: list[dict[str, Any]] = [
    LOW | {"min_p": 0.05},
    LOW | {"min_p": 0.4, "top_k": 30},
    LOW
    | {
        "logit_bias": {
            7: 2.5,
            40: -3.0,
            99: 1.0,
        }
    },
    {"logit_bias": {12: 4.0, 31: 0.5}},
    LOW
    | {
        "min_p": 0.1,
        "logit_bias": {5: 3.0},
        "frequency_penalty": 0.3,
    },
    LOW | {"allowed_token_ids": list(range(20, 200)), "min_p": 0.02},
    {"bad_words": ["\x7f"], "logit_bias": {3: 1.0}},
    LOW
    | {
        "min_tokens": 9,
        "ignore_eos": False,
        "logit_bias": {0: 4.0},
        "min_p": 0.05,
    },
    {"temperature": 1.5, "min_p": 0.3},
    LOW,
    LOW | {"top_p": 0.9},
    LOW | {"top_k": 20, "top_p": 0.9},
    LOW | {"presence_penalty": 1.5},
    LOW | {"logprobs": 2},
]
REQUESTS = prompts(len(SETTINGS), 40)


def params_of(**further: Any) -> list[SamplingParams]:
    return [
        greedy(24, seed=seed, **settings, **further)
        for seed, settings in enumerate(SETTINGS)
    ]


@pytest.mark.parametrize("name", full_but({"cp"}, METHODS))
def test_requests_of_a_batch_have_parameters_of_their_own(
    engine: Factory, drafting: Factory, name: str
) -> None:
    params = params_of()
    expected = generate(engine(on_v2=True), REQUESTS, params)
    plain = generate(engine(on_v2=True), REQUESTS, greedy(24))
    assert all(map(ne, expected[2:7], plain[2:7]))
    llm = drafting(METHODS[name])
    with accepting(llm):
        assert generate(llm, REQUESTS, params) == expected
    assert in_turn(llm, REQUESTS, params) == expected


def test_drafts_are_accepted_with_each_parameter(drafting: Factory) -> None:
    llm = drafting(METHODS["cp"])
    for param in params_of():
        with accepting(llm):
            generate(llm, REQUESTS, param)


class Unrepeated(LogitsProcessor):
    """Forbids the two tokens before each row's token, drafts among them, to requests
    that ask for it.
    """

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.states = req_states
        self.steps = 0
        self.asked = torch.zeros(req_states.max_num_reqs, dtype=torch.bool)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        asked = bool((sampling_params.extra_args or {}).get("unrepeated"))
        self.asked[req_idx] = asked
        return asked

    def apply_staged_writes(self) -> None:
        self.steps += 1

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        rows = self.asked[ctx.expanded_idx_mapping.cpu()].to(logits.device)
        # The newest committed token is the first row's input
        committed = self.states.all_token_ids.gpu[
            ctx.expanded_idx_mapping, (ctx.pos - 1).clamp(min=0)
        ]
        drafted = ctx.input_ids.roll(1)
        before = torch.where(
            ctx.expanded_local_pos > 0,
            drafted,
            committed,
        )
        for tokens in (ctx.input_ids, before):
            forbidden = torch.zeros_like(logits, dtype=torch.bool)
            forbidden.scatter_(1, tokens.long()[:, None], rows[:, None])
            logits.masked_fill_(forbidden, -torch.inf)
        return logits


def test_custom_logits_processors_see_drafts(
    engine: Factory, drafting: Factory
) -> None:
    """Beside requests that do not use them, greedy and with seeds."""
    settings = {"logits_processors": [Unrepeated]}
    params = [
        greedy(
            24,
            temperature=0.8 * (number % 3 > 0),
            seed=number,
            extra_args={"unrepeated": number % 2 == 0},
        )
        for number in range(8)
    ]
    requests = prompts(8, 40)
    expected = generate(engine(on_v2=True, **settings), requests, params)
    assert expected != generate(engine(on_v2=True), requests, params)
    for tokens in expected[::2]:
        assert all(first != second for first, second in pairwise(tokens))
    llm = drafting(METHODS["cp"], **settings)
    processor = runner_of(llm).sampler.logits_processors[-1]
    before = processor.steps
    with accepting(llm):
        assert generate(llm, requests, params) == expected
    assert processor.steps - before > 5

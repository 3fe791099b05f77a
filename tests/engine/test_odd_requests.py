# SPDX-License-Identifier: Apache-2.0
"""Requests with odd values: each is answered as by vLLM alone or refused in a short
line; others do not notice.
"""

from typing import Any

import pytest
from cases import greedy, prompts
from conftest import Factory
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.exception_handling.error_response import (
    create_error_response,
)
from vllm.exceptions import VLLMValidationError

from vllm_ppd.vllm_plugins import register

pytestmark = pytest.mark.engine
register()

ANSWERED: list[dict[str, Any]] = [
    {"vllm_xargs": {"ppd_draft": 0}},
    {"vllm_xargs": {"ppd_draft": "true", "session_id": "x"}},
    {"logprobs": 3, "min_tokens": 5},
    {"logprobs": 0, "logprob_token_ids": [7, 7, 9], "bad_words": ["a", "b c"]},
    {"prompt_logprobs": 2, "repetition_penalty": 1.3},
    {"allowed_token_ids": [9, 30, 44], "presence_penalty": 1.0},
    {"frequency_penalty": -2.0},
    {"stop": ["e", "i"], "include_stop_str_in_output": True},
    {"structured_outputs": {"regex": "[a-f]{3}"}, "stop_token_ids": [40, 50]},
    {"temperature": 1.9, "top_k": 5, "top_p": 0.5},
]
REFUSED: list[dict[str, Any]] = [
    {"vllm_xargs": {"ppd_draft": "maybe"}},
    {"vllm_xargs": {"ppd_draft": [1, 2]}},
    {"vllm_xargs": {"ppd_eps_b": 0.5}},
    {"vllm_xargs": {"ppd_eps_b": 1.5}},
    {"vllm_xargs": {"ppd_eps_b": "x" * 10_000}},
    {"vllm_xargs": {"ppd_eps_b": float("nan")}},
    {"vllm_xargs": {"ppd_darft": True}},
]


def parameters(changes: dict[str, Any]) -> Any:
    """vLLM's SamplingParams of a request to /v1/completions."""
    request = CompletionRequest.model_validate(
        {"prompt": "x", "temperature": 0, "max_tokens": 12, **changes}
    )
    return request.to_sampling_params(12, {})


def test_each_is_answered_as_by_vllm_alone(engine: Factory) -> None:
    """Greedy ones exactly; all of them run beside two plain requests, which are
    answered as without them.
    """
    llm = engine({"method": "ppd", "exit_layer": 3})
    alone = engine()
    odd = [parameters(changes) for changes in ANSWERED]
    asked = [*odd, greedy(12), greedy(12)]
    given = prompts(len(asked), 40)
    ours = llm.generate(given, asked, use_tqdm=False)
    theirs = alone.generate(given, asked, use_tqdm=False)
    for params, output, expected in zip(asked, ours, theirs, strict=True):
        if params.temperature == 0:
            first = output.outputs[0]
            second = expected.outputs[0]
            assert list(first.token_ids) == list(second.token_ids), params
            assert len(first.logprobs or ()) == len(second.logprobs or ()), params


@pytest.mark.parametrize(
    "changes", REFUSED, ids=[str(changes)[:40] for changes in REFUSED]
)
def test_others_are_refused(engine: Factory, changes: dict[str, Any]) -> None:
    llm = engine({"method": "ppd", "exit_layer": 3})
    with pytest.raises(VLLMValidationError) as refusal:
        llm.llm_engine.add_request("odd", prompts(1, 40)[0], parameters(changes))
    answer = create_error_response(refusal.value).error
    assert answer.code == 400
    assert len(answer.message) <= 300 and "\n" not in answer.message
    assert not llm.llm_engine.has_unfinished_requests()

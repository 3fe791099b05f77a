# SPDX-License-Identifier: Apache-2.0
"""Requests with odd values: each is answered as by vLLM alone or refused in a short
line; others do not notice.
"""

from typing import Any

import pytest
from cases import generate, greedy, prompts
from conftest import Factory
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.exception_handling.error_response import (
    create_error_response,
)
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.engine
OPTIONS = {"method": "ppd", "exit_layer": 3}
ANSWERED: list[dict[str, Any]] = [
    {"vllm_xargs": {"ppd_draft": 0}},
    {"vllm_xargs": {"ppd_draft": "true", "session_id": "x"}},
    {"logprobs": 0, "logprob_token_ids": [7, 7, 9], "bad_words": ["a", "b c"]},
    {"prompt_logprobs": 2, "repetition_penalty": 1.3},
    {"allowed_token_ids": [9, 30, 44], "presence_penalty": 1.0},
    {"stop": ["e", "i"], "include_stop_str_in_output": True},
    {"structured_outputs": {"regex": "[a-f]{3}"}, "stop_token_ids": [40, 50]},
]
REFUSED: list[dict[str, Any]] = [
    {"ppd_draft": [1, 2]},
    {"ppd_eps_b": 0.5},  # an option of another method
    {"ppd_eps_b": "x" * 10_000},
    {"ppd_darft": True},
]


def parameters(changes: dict[str, Any]) -> Any:
    """vLLM's SamplingParams of a request to /v1/completions."""
    request = CompletionRequest.model_validate(
        {"prompt": "x", "temperature": 0, "max_tokens": 12, **changes}
    )
    return request.to_sampling_params(12, {})


def test_each_is_answered_as_by_vllm_alone(engine: Factory) -> None:
    """Beside a sampling request, and others that are plain."""
    odd = [parameters(changes) for changes in ANSWERED]
    sampling = parameters({"temperature": 1.9, "top_k": 5, "top_p": 0.5})
    params = [greedy(12), *odd, greedy(12), sampling]
    requests = prompts(len(params), 40)
    ours = generate(engine(OPTIONS), requests, params)
    assert ours[:-1] == generate(engine(), requests, params)[:-1]


@pytest.mark.parametrize("options", REFUSED)
def test_others_are_refused(engine: Factory, options: dict[str, Any]) -> None:
    llm = engine(OPTIONS)
    params = parameters({"vllm_xargs": options})
    with pytest.raises(VLLMValidationError) as refusal:
        llm.llm_engine.add_request("odd", prompts(1, 40)[0], params)
    answer = create_error_response(refusal.value).error
    assert answer.code == 400
    assert len(answer.message) <= 300 and "\n" not in answer.message
    assert not llm.llm_engine.has_unfinished_requests()

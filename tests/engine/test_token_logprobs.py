# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chosen tokens: each request's own, whatever is beside it, as
vLLM alone gives them.
"""

from typing import Any

import pytest
from cases import SCHEMA, greedy, prompts
from conftest import Factory, counting
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

Row = list[tuple[int, float, int | None]]


def answers(
    llm: Any,
    requests: list[Any],
    params: list[SamplingParams],
) -> list[tuple[list[int], list[Row]]]:
    """Tokens, and a row each of (token, log-probability, rank) of what grammar and
    limits leave possible.
    """
    result = []
    for output in llm.generate(requests, params, use_tqdm=False):
        (answer,) = output.outputs
        rows = [
            sorted(
                (token, round(entry.logprob, 3), entry.rank)
                for token, entry in at.items()
                if entry.logprob > -1e30
            )
            for at in answer.logprobs or []
        ]
        assert len(rows) in (0, len(answer.token_ids))
        result.append((list(answer.token_ids), rows))
    return result


CHOSEN = greedy(24, logprob_token_ids=[5, 9])
MORE = greedy(16, logprob_token_ids=[300, 7, 7, 44, 120, 3])
GRAMMAR = greedy(
    40,
    ignore_eos=False,
    logprob_token_ids=[35, 36],
    structured_outputs=StructuredOutputsParams(json=SCHEMA),
)
WITHOUT_DRAFTS = greedy(
    24, extra_args={"ppd_draft": False}, logprob_token_ids=[5]
)
BESIDE = [
    greedy(30, logprobs=3),
    CHOSEN,
    greedy(20),
    MORE,
    greedy(12, logprobs=0),
]


@pytest.mark.engine
@pytest.mark.parametrize(
    "params",
    [
        [greedy(24, logprob_token_ids=[5, 9], logprobs=2)],
        BESIDE,
        [WITHOUT_DRAFTS, greedy(24, logprobs=8), CHOSEN],
        [GRAMMAR, greedy(30, logprobs=2), MORE],
    ],
    ids=["with logprobs", "beside logprobs", "without drafts", "structured"],
)
def test_as_vllm_alone_gives_them(
    engine: Factory, params: list[SamplingParams]
) -> None:
    """Alone means each request by itself: vLLM mixes up the rows of a batch."""
    requests = prompts(len(params), 60)
    alone = [
        answers(engine(), [request], [param])[0]
        for request, param in zip(requests, params, strict=True)
    ]
    llm = engine({"method": "early", "exit_layer": 3})
    with counting(llm) as seen:
        assert answers(llm, requests, params) == alone
    assert seen["drafted"] > 0

# SPDX-License-Identifier: Apache-2.0
"""Requests with a seed through preemptions: each alone, then among others that do not
all fit into the KV cache.
"""

from typing import Any

from cases import generate, in_turn
from vllm import SamplingParams

# Blocks for two requests of the greatest length, so that three or more preempt each
# other.
SMALL_KV = {
    "max_model_len": 128,
    "block_size": 32,
    "num_gpu_blocks_override": 9,
    "max_num_seqs": 6,
    # Prompts are read whole: vLLM's own V1 runner ends at a seeded prompt in chunks on
    # a CPU.
    "max_num_batched_tokens": 1024,
}


PROMPTS = [f"def f{i}(self, x):\n    return" for i in range(6)]
PARAMS = [
    SamplingParams(
        temperature=1.0,
        seed=i,
        max_tokens=70,
        ignore_eos=True,
    )
    for i in range(6)
]


def outputs(llm: Any) -> dict[str, list[list[int]]]:
    """What an engine says to each request alone, to three and to all together, and to
    all while it is reset.
    """
    return {
        "alone": in_turn(llm, PROMPTS, PARAMS),
        "three together": generate(llm, PROMPTS[:3], PARAMS[:3]),
        "together": generate(llm, PROMPTS, PARAMS),
        "reset": reset_between(llm),
    }


def reset_between(llm: Any) -> list[list[int]]:
    """The answers to requests that are all preempted, and the prefix cache dropped, in
    every eighth step.
    """
    engine = llm.llm_engine
    answers = {}
    for name, (prompt, param) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(f"reset-{name}", prompt, param)
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request_id.split("-")[1]] = output.outputs[0].token_ids
        steps += 1
        if steps % 8 == 0:
            assert engine.reset_prefix_cache(reset_running_requests=True)
    return [list(answers[name]) for name in sorted(answers)]


def check(answers: dict[str, list[list[int]]], expected: list[list[int]]) -> None:
    """Every way of asking gives the expected output, of which each is another's."""
    assert len(set(map(tuple, expected))) == len(expected)
    for way, texts in answers.items():
        assert texts == expected[: len(texts)], way

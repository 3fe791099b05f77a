# SPDX-License-Identifier: Apache-2.0
"""Requests with a seed through preemptions: each alone, then among others that do not
all fit into the KV cache.
"""

from typing import Any

from cases import generate
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


def requests(tokens: int = 70) -> tuple[list[str], list[SamplingParams]]:
    """Six prompts, and their parameters with a seed each."""
    prompts = [f"def f{i}(self, x):\n    return" for i in range(6)]
    return prompts, [
        SamplingParams(temperature=1.0, seed=i, max_tokens=tokens, ignore_eos=True)
        for i in range(6)
    ]


def outputs(
    llm: Any, company: tuple[int, ...] = (3, 6), tokens: int = 70
) -> dict[str, list[list[int]]]:
    """What an engine says to each request alone, to the first so many together, and to
    these while it is reset.
    """
    prompts, params = requests(tokens)
    answers = {
        "alone": [
            generate(llm, [p], [q])[0]
            for p, q in zip(prompts[: company[-1]], params, strict=False)
        ]
    }
    for number in company:
        answers[f"{number} together"] = generate(llm, prompts[:number], params[:number])
    answers["reset"] = reset_between(llm, prompts[: company[-1]], params)
    return answers


def reset_between(
    llm: Any, prompts: list[str], params: list[SamplingParams]
) -> list[list[int]]:
    """The answers to requests that are all preempted, and the prefix cache dropped, in
    every eighth step.
    """
    engine = llm.llm_engine
    answers = {}
    for name, (prompt, param) in enumerate(zip(prompts, params, strict=False)):
        engine.add_request(f"reset-{name}", prompt, param)
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request_id.split("-")[1]] = output.outputs[0].token_ids
        steps += 1
        if steps % 8 == 0:
            assert engine.reset_prefix_cache(reset_running_requests=True)
    return [list(answers[str(name)]) for name in range(len(answers))]


def check(answers: dict[str, list[list[int]]], expected: list[list[int]]) -> None:
    """Every way of asking gives the expected output, of which each is another's."""
    assert len(set(map(tuple, expected))) == len(expected)
    differing = {
        way: [
            next(
                i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]
            )
            if a != b
            else None
            for a, b in zip(texts, expected, strict=False)
        ]
        for way, texts in answers.items()
    }
    assert not any(
        place is not None for places in differing.values() for place in places
    ), differing

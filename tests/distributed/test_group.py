# SPDX-License-Identifier: Apache-2.0
"""A worker group over two pipeline stages says what one rank says without speculation,
token for token.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import preempted
import pytest
from cases import (
    CASES,
    SCHEMA,
    after_a_prefix,
    generate,
    greedy,
    prompts,
    run_arrivals,
)
from conftest import (
    Factory,
    accepting,
    counting,
    end_workers,
    engines,
    full_but,
    start_engine,
)
from updated import change_weights
from vllm import SamplingParams
from vllm.config import ReasoningConfig
from vllm.sampling_params import StructuredOutputsParams

pytestmark = [pytest.mark.engine, pytest.mark.ranks]

# The first stage in two stacks: candidates run through two layers, the rest waits for
# the target's choice.
CANDIDATES = {
    "method": "group",
    "candidates": 3,
    "exit_layer": 4,
    "num_speculative_tokens": 5,
    "heads": ("hand-made", {"exit_layers": (4,), "noise": 0.05}),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "one candidate": {"method": "group"},
    "candidates": CANDIDATES,
    "late": {
        "method": "group",
        "candidates": 8,
        "exit_layer": 5,
        "num_speculative_tokens": 1,
        "disable_by_batch_size": 16,
    },
}

# Structured output: test_prompts_of_a_single_token_join.
QUICK = {
    ("candidates", case)
    for case in (
        "batch_1",
        "batch_16",
        "model_length",
        "stop_token_and_eos",
        "logprobs",
        "arrivals_and_aborts",
    )
}

SETTINGS: dict[str, Any] = {
    "enable_prefix_caching": True,
    "reasoning_config": ReasoningConfig(
        reasoning_start_str="<t>", reasoning_end_str="</t>"
    ),
    # Too few for the batch that is preempted
    "num_gpu_blocks_override": 30,
}

# Prompts that are read in one chunk: all of them start to decode at once.
SHORT = [{"prompt_token_ids": [7 * i + 3, 40, 3]} for i in range(9)]


@pytest.fixture(scope="module")
def group(
    tiny_model: Factory, with_heads: Factory
) -> Iterator[Callable[..., Any]]:
    """group(options, family, **settings): an engine of two stages."""
    with engines(tiny_model) as get:

        def two_stages(
            options: dict[str, Any] | None = CANDIDATES,
            family: str = "llama",
            **settings: Any,
        ) -> Any:
            options = options and with_heads(options, family)
            settings = {
                "pipeline_parallel_size": 2,
                **SETTINGS,
                **settings,
            }
            return get(options, family, **settings)

        yield two_stages


@pytest.fixture(scope="module")
def plain(tiny_model: Factory) -> Any:
    """vLLM alone on runner V2, the reference for seeds and prefixes."""
    return start_engine(
        tiny_model(),
        None,
        on_v2=True,
        **SETTINGS,
    )


@pytest.mark.parametrize(
    ("name", "case"), full_but(QUICK, itertools.product(VARIANTS, CASES))
)
def test_same_tokens(
    alone: Factory, group: Factory, name: str, case: str
) -> None:
    assert CASES[case](group(VARIANTS[name])) == alone(case)


@pytest.mark.full
@pytest.mark.parametrize("case", ["batch_1", "batch_16"])
def test_same_tokens_compiled(alone: Factory, group: Factory, case: str) -> None:
    llm = group(VARIANTS["one candidate"], enforce_eager=False)
    assert CASES[case](llm) == alone(case)


def test_group_works_in_small_batches_alone(group: Factory) -> None:
    """The suite above would pass without a micro-step: hits and misses of every kind
    must have been seen.
    """
    llm = group()
    # What a step's last frame was too early for comes with the next step
    generate(llm, prompts(1), greedy())
    with counting(llm) as seen:
        generate(llm, prompts(1), greedy())
    hits = seen["group_hits"]
    misses = seen["group_misses"]
    # Every token but the prompt's comes from a micro-step, and the last of them needs
    # no candidates.
    assert seen["group_micro_steps"] == seen["group_tokens"] == 39
    assert hits + misses == 38 and min(hits, misses) > 3
    assert seen["group_candidates"] == 3 * 38
    assert seen["group_candidates_discarded"] == 3 * 38 - hits
    # Of six layers: two of each candidate, and all of each token but for the two that
    # its candidate has done.
    assert seen["group_first_stage_layers"] == 2 * 3 * 38 + 4 * 39 - 2 * hits
    assert seen["group_last_stage_layers"] == 2 * 39
    assert seen["accepted"] + seen["drafts"] == 39
    # Nine requests are more than the cut-off of eight; they start and end together, so
    # it is never undercut.
    for requests in (SHORT, SHORT[:8]):
        with counting(llm) as seen:
            generate(llm, requests, greedy(12))
        for name in ("micro_steps", "hits", "misses"):
            assert (seen[f"group_{name}"] > 0) == (len(requests) <= 8)


def test_seeded_requests_draw_as_without_speculation(
    plain: Any, group: Factory
) -> None:
    """A token is drawn once, by vLLM's sampler at its position: with a seed nothing differs."""
    limits: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 20},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"allowed_token_ids": list(range(2, 200))},
        {},
    ]
    params = [
        greedy(
            30,
            temperature=0.8,
            seed=i,
            **limit,
        )
        for i, limit in enumerate(limits)
    ]
    # Prompts that are read in chunks as well, whose tokens are drawn at the same
    # positions.
    requests = [*SHORT[:4], *prompts(2, 150)]
    with counting(group()) as seen:
        answers = generate(group(), requests, params)
    assert answers == generate(plain, requests, params)
    assert seen["group_hits"] > 0 and seen["group_misses"] > 0


@pytest.mark.full
def test_output_with_a_seed_is_vllms_through_preemptions(
    plain: Any, group: Factory
) -> None:
    with counting(group()) as seen:
        answers = preempted.outputs(group())
    preempted.check(answers, preempted.outputs(plain)["alone"])
    assert seen["group_hits"] > 0 and seen["group_misses"] > 0
    assert seen["preempted"] > 6


# Two blocks and a token: read again, one token of it is left to compute.
REPEATED = {"prompt_token_ids": [(11 * i) % 250 + 2 for i in range(65)]}
SINGLE = {"prompt_token_ids": [77]}


def _joined(
    llm: Any, running: int, params: SamplingParams
) -> dict[str, list[int]]:
    """Prompts with one token to compute that join requests which have decoded for some steps."""
    generate(llm, [REPEATED], greedy(2))
    arrivals = {
        0: [(request, greedy(60)) for request in SHORT[:running]],
        4: [(REPEATED, params), (SINGLE, params)],
    }
    return run_arrivals(llm, arrivals)


@pytest.mark.parametrize(
    ("running", "params"),
    [
        (3, greedy(repetition_penalty=1.3)),
        (
            3,
            greedy(
                ignore_eos=False,
                structured_outputs=StructuredOutputsParams(json=SCHEMA),
            ),
        ),
        (3, greedy(logprob_token_ids=[5, 9])),
        (9, greedy()),
    ],
    ids=["penalties", "structured output", "logprobs", "above the cut-off"],
)
def test_prompts_of_a_single_token_join(
    plain: Any, group: Factory, running: int, params: SamplingParams
) -> None:
    """vLLM would pad such prompts with drafts, which are none of the group's."""
    with counting(group()) as seen:
        answers = _joined(group(), running, params)
    assert answers == _joined(plain, running, params)
    assert (seen["group_micro_steps"] > 0) == (running <= 8)


def test_thinking_budget(plain: Any, group: Factory) -> None:
    """Where a budget is spent the end of the thought is forced, in that request and in no other."""
    start, end = (
        plain.get_tokenizer().encode(text, add_special_tokens=False)
        for text in ("<t>", "</t>")
    )
    requests = [*SHORT[:3], {"prompt_token_ids": [*start, 40, 3]}, SHORT[3]]
    params = [
        greedy(thinking_token_budget=budget) for budget in (None,) * 3 + (6, None)
    ]
    got = generate(group(), requests, params)
    assert got == generate(plain, requests, params)
    ended = [
        any(tokens[at : at + len(end)] == end for at in range(40))
        for tokens in got
    ]
    assert ended == [False, False, False, True, False]


def test_prefix_cache_hits(plain: Any, group: Factory) -> None:
    """What the group wrote is good for later requests, emitted tokens included."""
    assert after_a_prefix(group(), 5) == after_a_prefix(plain, 5)


def test_preemption(plain: Any, group: Factory) -> None:
    """A KV cache too small for the batch: requests are evicted in mid-decode and
    resumed, candidates and all.
    """
    outputs = []
    for llm in (plain, group()):
        with counting(llm) as seen:
            outputs.append(generate(llm, prompts(8, 90), greedy(100)))
        assert seen["preempted"] > 0
    assert outputs[1] == outputs[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "family", ["gemma3", "qwen2", "qwen3", "mistral", "phi3"]
)
def test_families(engine: Factory, group: Factory, family: str) -> None:
    """Gemma 3 keeps its KV in two groups, so every candidate has two tail blocks; its
    norms are of another kind.
    """
    options = {
        "method": "group",
        "candidates": 3,
        "exit_layer": 4,
    }
    answers = []
    with counting(group(options, family)) as seen:
        for llm in (group(options, family), engine(family=family)):
            batch = generate(llm, prompts(6), greedy())
            answers.append([CASES["batch_1"](llm), batch])
    assert answers[0] == answers[1]
    assert seen["group_hits"] > 0


@pytest.mark.full
def test_trained_heads_are_right_more_often(
    alone: Factory, group: Factory
) -> None:
    rates = []
    fitted = ("early", {"head": "classifier", "exit_layers": (4,)})
    for options in (CANDIDATES, CANDIDATES | {"heads": fitted}):
        llm = group(options)
        with counting(llm) as seen:
            assert CASES["batch_1"](llm) == alone("batch_1")
        rates.append(
            seen["group_hits"] / (seen["group_hits"] + seen["group_misses"])
        )
    assert rates[1] > rates[0] + 0.05


@pytest.mark.full
def test_two_by_two_ranks(alone: Factory, group: Factory) -> None:
    """Two tensor-parallel ranks a stage: each finds the same candidates, and talks to
    the rank of its own number.
    """
    llm = group(tensor_parallel_size=2)
    with counting(llm) as seen:
        for case in ("batch_1", "arrivals_and_aborts"):
            assert CASES[case](llm) == alone(case)
    assert seen["group_hits"] > 0


@pytest.mark.full
def test_weights_that_change_reach_both_stages(
    engine: Factory, group: Factory, other_model: Path
) -> None:
    """The first stage reads candidates by its copy of the last one's norm and LM head."""
    requests = prompts(4)
    llm = group(VARIANTS["late"], seed=1)  # an engine of its own
    assert generate(llm, requests, greedy()) == generate(
        engine(), requests, greedy()
    )
    change_weights(llm, other_model, "reload")
    llm.reset_prefix_cache()
    with counting(llm) as seen:
        said = generate(llm, requests, greedy())
    assert said == generate(start_engine(other_model, None), requests, greedy())
    assert seen["group_hits"] > seen["group_misses"] > 0


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray of this machine with two devices; vLLM's CPU backend has no name for Ray's,
    so it borrows that of GPUs.
    """
    import ray
    from vllm.platforms.cpu import CpuPlatform

    def name_devices() -> (
        None
    ):  # in the workers; a nested function travels by value
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.ray_device_key = "GPU"

    monkeypatch.setattr(CpuPlatform, "ray_device_key", "GPU")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"worker_process_setup_hook": name_devices},
    )
    yield
    ray.shutdown()


@pytest.mark.full
def test_stages_that_are_rays_actors(
    tiny_model: Factory, with_heads: Factory, alone: Factory, cluster: None
) -> None:
    llm = start_engine(
        tiny_model(),
        with_heads(CANDIDATES),
        pipeline_parallel_size=2,
        distributed_executor_backend="ray",
    )
    try:
        executor = llm.llm_engine.engine_core.engine_core.model_executor
        assert type(executor).__name__ == "RayExecutorV2"
        with accepting(llm) as seen:
            for case in ("batch_1", "batch_16", "structured_output"):
                assert CASES[case](llm) == alone(case)
        # They come with the output, from wherever the worker is
        assert seen["group_hits"] > 0
    finally:
        end_workers(llm)

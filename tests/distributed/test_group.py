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
import tiny
from cases import CASES, SCHEMA, after_a_prefix, generate, greedy, prompts
from conftest import DEMO, Factory, counting, end_workers, full_but, start_engine
from vllm import SamplingParams
from vllm.config import ReasoningConfig
from vllm.sampling_params import StructuredOutputsParams

pytestmark = [pytest.mark.engine, pytest.mark.ranks]

VARIANTS: dict[str, dict[str, Any]] = {
    "one candidate": {"method": "ppd"},
    # The first stage in two stacks: candidates run through two layers, the rest waits
    # for the target's choice.
    "candidates": {
        "method": "ppd",
        "candidates": 3,
        "exit_layer": 4,
        "num_speculative_tokens": 5,
    },
    "late": {
        "method": "ppd",
        "candidates": 8,
        "exit_layer": 5,
        "num_speculative_tokens": 1,
        "disable_by_batch_size": 16,
    },
}

# Structured output and logprobs: test_prompts_of_one_token_join and
# test_logprobs_of_some_tokens.
QUICK = {
    ("candidates", case) for case in ("batch_1", "batch_16", "arrivals_and_aborts")
}

# Prompts that are read in one chunk: all of them start to decode at once.
SHORT = [{"prompt_token_ids": [7 * i + 3, 40, 3]} for i in range(9)]


@pytest.fixture(scope="module")
def group(tiny_model: Factory) -> Iterator[Callable[..., Any]]:
    """group(speculative_config, **settings): an engine of two stages; the same
    arguments give the same engine.
    """
    started: dict[str, Any] = {}

    def get(
        options: dict[str, Any] | None, family: str = "llama", **settings: Any
    ) -> Any:
        key = repr((options, family, sorted(settings.items())))
        if key not in started:
            started[key] = start_engine(
                tiny_model(family), options, pipeline_parallel_size=2, **settings
            )
        return started[key]

    yield get
    for llm in started.values():
        end_workers(llm)


@pytest.fixture(scope="module")
def plain(tiny_model: Factory) -> Factory:
    """plain(model, **settings): vLLM alone on runner V2, the same engine for the same arguments."""
    started: dict[str, Any] = {}

    def get(model: Path | None = None, **settings: Any) -> Any:
        key = repr((model, sorted(settings.items())))
        if key not in started:
            started[key] = start_engine(
                model or tiny_model(), None, on_v2=True, **settings
            )
        return started[key]

    return get


@pytest.mark.parametrize(
    ("name", "case"), full_but(QUICK, itertools.product(VARIANTS, CASES))
)
def test_same_tokens(alone: Factory, group: Factory, name: str, case: str) -> None:
    assert CASES[case](group(VARIANTS[name])) == alone(case)


@pytest.mark.full
@pytest.mark.parametrize("case", ["batch_1", "batch_16"])
def test_same_tokens_as_stages_without_speculation(
    engine: Factory, group: Factory, case: str
) -> None:
    """vLLM's own pipeline of the same split, which an eager CPU engine of 0.32 cannot start."""
    compiled = {"enforce_eager": False}
    assert CASES[case](group(VARIANTS["one candidate"], **compiled)) == CASES[case](
        group(None, **compiled)
    )


def test_group_works_in_small_batches_alone(group: Factory) -> None:
    """The suite above would pass without a micro-step: hits and misses of every kind
    must have been seen.
    """
    llm = group(VARIANTS["candidates"])
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
    assert (seen["group_candidates"], seen["group_candidates_discarded"]) == (
        3 * 38,
        3 * 38 - hits,
    )
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
        grown = [
            seen[f"group_{name}"] > 0 for name in ("micro_steps", "hits", "misses")
        ]
        assert grown == [len(requests) <= 8] * 3


def test_seeded_requests_draw_as_without_speculation(
    plain: Factory, group: Factory
) -> None:
    """A token is drawn once, by vLLM's sampler at its position: with a seed nothing differs."""
    sampling = {"max_tokens": 30, "ignore_eos": True}
    limits: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 20},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"allowed_token_ids": list(range(2, 200))},
        {},
    ]
    params = [
        SamplingParams(temperature=0.8, seed=i, **sampling, **limit)
        for i, limit in enumerate(limits)
    ]
    # Prompts that are read in chunks as well, whose tokens are drawn at the same
    # positions.
    requests = [*SHORT[:4], *prompts(2, 150)]
    expected = generate(plain(max_num_batched_tokens=512), requests, params)
    llm = group(VARIANTS["candidates"])
    with counting(llm) as seen:
        assert generate(llm, requests, params) == expected
    assert seen["group_hits"] > 0 and seen["group_misses"] > 0


@pytest.mark.full
def test_output_with_a_seed_is_vllms_through_preemptions(plain: Factory) -> None:
    alone = preempted.outputs(plain(DEMO, **preempted.SMALL_KV))
    options = {"method": "ppd", "candidates": 3, "num_speculative_tokens": 3}
    llm = start_engine(DEMO, options, pipeline_parallel_size=2, **preempted.SMALL_KV)
    try:
        with counting(llm) as seen:
            preempted.check(preempted.outputs(llm), alone["alone"])
        assert (
            seen["group_hits"] > 0
            and seen["group_misses"] > 0
            and seen["preempted"] > 6
        )
    finally:
        end_workers(llm)


# Two blocks and a token: read again, one token of it is left to compute.
REPEATED = {"prompt_token_ids": [(11 * i) % 250 + 2 for i in range(65)]}
SINGLE = {"prompt_token_ids": [77]}
THOUGHT = ReasoningConfig(reasoning_start_str="<t>", reasoning_end_str="</t>")


BLOCK = 2 * 2 * 32 * 32 * 4  # bytes a layer
# Enough for ten requests of two blocks and one of four, and too few for the batch that
# is preempted
BLOCKS = 28


def _with_prefix_cache(plain: Factory, group: Factory) -> tuple[Any, Any]:
    """One rank alone and a group, both of which keep prefixes and know where a thought
    begins and ends.

    Their KV caches are small; the first stage has four of the six layers.
    """
    settings: dict[str, Any] = {
        "enable_prefix_caching": True,
        "reasoning_config": THOUGHT,
    }
    return (
        plain(kv_cache_memory_bytes=BLOCKS * 6 * BLOCK, **settings),
        group(
            VARIANTS["candidates"], kv_cache_memory_bytes=BLOCKS * 4 * BLOCK, **settings
        ),
    )


def _joined(llm: Any, running: int, params: SamplingParams) -> list[list[int]]:
    """Prompts with one token to compute that join requests which have decoded for some steps."""
    generate(llm, [REPEATED], greedy(2))
    arrivals = {
        0: [(request, greedy(60)) for request in SHORT[:running]],
        4: [(REPEATED, params), (SINGLE, params)],
    }
    engine = llm.llm_engine
    finished = {}
    added = 0
    step = 0
    while step <= max(arrivals) or engine.has_unfinished_requests():
        for request, settings in arrivals.get(step, ()):
            engine.add_request(f"joined-{added}", request, settings)
            added += 1
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    return [finished[f"joined-{name}"] for name in range(added)]


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
        (3, greedy(logprobs=2)),
        (9, greedy()),
    ],
    ids=["penalties", "structured output", "logprobs", "above the cut-off"],
)
def test_prompts_of_a_single_token_join(
    plain: Factory, group: Factory, running: int, params: SamplingParams
) -> None:
    """vLLM would pad such prompts with drafts, which are none of the group's."""
    alone, stages = _with_prefix_cache(plain, group)
    with counting(stages) as seen:
        assert _joined(stages, running, params) == _joined(alone, running, params)
    assert (seen["group_micro_steps"] > 0) == (running <= 8)


@pytest.mark.full
def test_logprobs_of_some_tokens(plain: Factory, group: Factory) -> None:
    """Beside a request that wants none: no step of the batch goes on."""
    params = [greedy(20), greedy(20, logprob_token_ids=[5, 9])]
    results = []
    for llm in _with_prefix_cache(plain, group):
        free, asked = (
            output.outputs[0]
            for output in llm.generate(SHORT[:2], params, use_tqdm=False)
        )
        assert free.logprobs is None and len(asked.logprobs) == 20
        assert all({5, 9} <= set(at) for at in asked.logprobs)
        logprobs = [
            sorted((token, round(entry.logprob, 3)) for token, entry in at.items())
            for at in asked.logprobs
        ]
        results.append((list(free.token_ids), list(asked.token_ids), logprobs))
    assert results[1] == results[0]


@pytest.mark.full
def test_thinking_budget(plain: Factory, group: Factory) -> None:
    """Where a budget is spent the end of the thought is forced, in that request and in no other."""
    alone, stages = _with_prefix_cache(plain, group)
    start, end = (
        alone.get_tokenizer().encode(text, add_special_tokens=False)
        for text in ("<t>", "</t>")
    )
    requests = [*SHORT[:3], {"prompt_token_ids": [*start, 40, 3]}, SHORT[3]]
    params = [greedy(), greedy(), greedy(), greedy(thinking_token_budget=6), greedy()]
    got = generate(stages, requests, params)
    assert got == generate(alone, requests, params)
    ended = [
        any(tokens[at : at + len(end)] == end for at in range(40)) for tokens in got
    ]
    assert ended == [False, False, False, True, False]


@pytest.mark.full
def test_prefix_cache_hits(plain: Factory, group: Factory) -> None:
    """What the group wrote is good for later requests, emitted tokens included."""
    expected, answers = (
        after_a_prefix(llm, 5) for llm in _with_prefix_cache(plain, group)
    )
    assert answers == expected


def test_preemption(plain: Factory, group: Factory) -> None:
    """A KV cache too small for the batch: requests are evicted in mid-decode and
    resumed, candidates and all.
    """
    outputs = []
    for llm in _with_prefix_cache(plain, group):
        outputs.append(generate(llm, prompts(8, 90), greedy(100)))
        assert llm.counts["preempted"] > 0
    assert outputs[1] == outputs[0]


@pytest.mark.parametrize(
    "family", full_but((), ["gemma3", "qwen2", "qwen3", "mistral", "phi3"])
)
def test_families(engine: Factory, group: Factory, family: str) -> None:
    """Gemma 3 keeps its KV in two groups, so every candidate has two tail blocks; its
    norms are of another kind.
    """
    expected = (
        CASES["batch_1"](engine(family=family)),
        generate(engine(family=family), prompts(6), greedy()),
    )
    llm = group({"method": "ppd", "candidates": 3, "exit_layer": 4}, family=family)
    with counting(llm) as seen:
        assert (CASES["batch_1"](llm), generate(llm, prompts(6), greedy())) == expected
    assert seen["group_hits"] > 0


def test_heads_on_the_first_stage(
    alone: Factory, group: Factory, fitted_heads: Factory
) -> None:
    """Trained heads are right more often than the bare exit."""
    rates = []
    for heads in ({}, {"model": fitted_heads("early", head="classifier")}):
        llm = group(VARIANTS["candidates"] | heads)
        with counting(llm) as seen:
            assert CASES["batch_1"](llm) == alone("batch_1")
        rates.append(seen["group_hits"] / (seen["group_hits"] + seen["group_misses"]))
    assert rates[1] > rates[0] + 0.05


@pytest.mark.full
def test_two_by_two_ranks(alone: Factory, group: Factory) -> None:
    """Two tensor-parallel ranks a stage: each finds the same candidates, and talks to
    the rank of its own number.
    """
    llm = group(VARIANTS["candidates"], tensor_parallel_size=2)
    with counting(llm) as seen:
        assert [CASES[case](llm) for case in ("batch_1", "arrivals_and_aborts")] == [
            alone(case) for case in ("batch_1", "arrivals_and_aborts")
        ]
    assert seen["group_hits"] > 0


@pytest.mark.full
def test_weights_that_change_reach_both_stages(
    tiny_model: Factory, engine: Factory, made_once: Factory
) -> None:
    """The first stage reads candidates by its copy of the last one's norm and LM head."""
    requests = prompts(4)
    other = made_once("llama-other", lambda folder: tiny.make_model(folder, seed=1))
    llm = start_engine(tiny_model(), VARIANTS["late"], pipeline_parallel_size=2)
    alone = start_engine(other, None)
    try:
        assert generate(llm, requests, greedy()) == generate(
            engine(), requests, greedy()
        )
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        with counting(llm) as seen:
            said = generate(llm, requests, greedy())
        assert said == generate(alone, requests, greedy())
        assert seen["group_hits"] > seen["group_misses"] > 0
    finally:
        end_workers(llm)

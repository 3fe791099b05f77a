# SPDX-License-Identifier: Apache-2.0
"""The cases of the exactness suite, each of which runs the same requests on two engines,
and the variants of drafting; the tokens must be identical.
"""

import itertools
import json
import string
from collections.abc import Callable
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "ok"],
    "additionalProperties": False,
}


def prompts(count: int, longest: int = 120) -> list[dict[str, list[int]]]:
    """Prompts of different lengths, most of them longer than a chunk."""
    lengths = [3 + (longest * (i + 1)) // count for i in range(count)]
    return [
        {"prompt_token_ids": [(7 * i + j * j) % 250 + 2 for j in range(n)]}
        for i, n in enumerate(lengths)
    ]


def generate(llm: Any, requests: list[Any], params: Any) -> list[list[int]]:
    return tokens_of(llm.generate(requests, params, use_tqdm=False))


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    """The token IDs of the first answer to each request."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def in_turn(llm: Any, requests: list[Any], params: Any) -> list[list[int]]:
    """generate() of one request after the other."""
    pairs = zip(requests, params, strict=True)
    return [generate(llm, [request], param)[0] for request, param in pairs]


def greedy(max_tokens: int = 40, **settings: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            **settings,
        }
    )


def after_a_prefix(
    llm: Any, count: int = 6, tokens: int = 40
) -> list[tuple[list[int], int]]:
    """Outputs, and cached tokens, of requests that begin alike, the last of them with
    the whole output of the first.

    The positions of that output were drafted. The prefix cache is empty before.
    """
    assert llm.reset_prefix_cache()
    shared = prompts(1)[0]["prompt_token_ids"][:96]
    requests = [{"prompt_token_ids": [*shared, 5 + i, 9]} for i in range(count)]
    first = generate(llm, requests[:1], greedy())[0]
    requests.append({"prompt_token_ids": requests[0]["prompt_token_ids"] + first})
    outputs = llm.generate(requests, greedy(tokens), use_tqdm=False)
    assert outputs[-1].num_cached_tokens >= 128
    cached = [output.num_cached_tokens for output in outputs]
    return list(zip(tokens_of(outputs), cached, strict=True))


def batch_1(llm: Any) -> Any:
    return in_turn(llm, prompts(3), [greedy()] * 3)


def batch_16(llm: Any) -> Any:
    return generate(llm, prompts(16), greedy())


def mixed_lengths(llm: Any) -> Any:
    """Requests that end at different steps, so that the batch shrinks and rows move."""
    return generate(
        llm, prompts(12), [greedy(max_tokens=3 + 5 * i) for i in range(12)]
    )


def more_than_fit(llm: Any) -> Any:
    """Twice as many requests as the batch holds: new ones join while others decode."""
    return generate(
        llm, prompts(32), [greedy(max_tokens=5 + i % 20) for i in range(32)]
    )


def token_limits(llm: Any) -> Any:
    return [
        generate(llm, prompts(4), greedy(max_tokens=n)) for n in (1, 2, 3, 4, 5)
    ]


def model_length(llm: Any) -> Any:
    """Generation up to the model's length, from prompts that leave 1, 2, 3, ... tokens of room."""
    room = [
        {"prompt_token_ids": [(5 * j) % 250 + 2 for j in range(256 - left)]}
        for left in (1, 2, 3, 4, 5, 6, 9)
    ]
    return generate(llm, room, greedy(max_tokens=300))


def stop_token_and_eos(llm: Any) -> Any:
    free = generate(llm, prompts(6), greedy())
    stops = [greedy(stop_token_ids=[tokens[7]]) for tokens in free]
    # The end of text after 1 to 30 tokens, and not in all
    ended = generate(
        llm, prompts(6), greedy(ignore_eos=False, logit_bias={0: 2.0})
    )
    return generate(llm, prompts(6), stops), ended


def stop_strings(llm: Any) -> Any:
    free = llm.generate(prompts(6), greedy(), use_tqdm=False)
    # The seventh to ninth character of each output: a stop that falls anywhere within a
    # run of drafts.
    stops = [
        greedy(stop=[output.outputs[0].text[6:9] or "zz"]) for output in free
    ]
    outputs = llm.generate(prompts(6), stops, use_tqdm=False)
    return [
        (
            o.outputs[0].text,
            list(o.outputs[0].token_ids),
            o.outputs[0].stop_reason,
        )
        for o in outputs
    ]


def structured_output(llm: Any) -> Any:
    endless, ended = (
        greedy(60, ignore_eos=False, structured_outputs=grammar)
        for grammar in (
            StructuredOutputsParams(json=SCHEMA),
            StructuredOutputsParams(
                regex=r'\{"name": "[a-z]{1,8}", "ok": (true|false)\}'
            ),
        )
    )
    outputs = llm.generate(
        prompts(4, 20), [endless, greedy(), ended, greedy()], use_tqdm=False
    )
    assert outputs[2].outputs[0].finish_reason == "stop"
    assert set(json.loads(outputs[2].outputs[0].text)) == {"name", "ok"}
    return tokens_of(outputs)


def penalties(llm: Any) -> Any:
    """What depends on the output so far, drafts included."""
    settings = [
        greedy(repetition_penalty=1.3),
        greedy(presence_penalty=0.8, frequency_penalty=0.4),
        greedy(min_tokens=12, ignore_eos=False, logit_bias={0: 4.0}),
        greedy(allowed_token_ids=list(range(2, 120))),
        greedy(bad_words=list(string.ascii_lowercase)),
    ]
    return generate(llm, prompts(5), settings)


def logprobs(llm: Any) -> Any:
    """The same tokens with the same log-probabilities, to float32 rounding."""
    outputs = llm.generate(
        prompts(5), greedy(logprobs=3, prompt_logprobs=1), use_tqdm=False
    )
    result = []
    for output in outputs:
        chosen = output.outputs[0]
        rows = [
            sorted(
                (token, round(entry.logprob, 3)) for token, entry in at.items()
            )
            for at in chosen.logprobs
        ]
        result.append(list(zip(chosen.token_ids, rows, strict=True)))
    return result


def run_arrivals(
    llm: Any,
    arrivals: dict[int, list[tuple[Any, SamplingParams]]],
    aborted: dict[int, str] | None = None,
) -> dict[str, list[int]]:
    """The outputs by name, arrival-0 first, of requests that come and go in mid-flight.

    Args:
        llm: driven a step at a time.
        arrivals: requests with their parameters, by the step at which they come.
        aborted: names of requests, by the step at which they go.
    """
    engine = llm.llm_engine
    finished: dict[str, list[int]] = {}
    count = itertools.count()
    step = 0
    while step <= max(arrivals) or engine.has_unfinished_requests():
        for request, params in arrivals.get(step, ()):
            engine.add_request(f"arrival-{next(count)}", request, params)
        if aborted and step in aborted:
            engine.abort_request([aborted[step]], internal=False)
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    return finished


def arrivals_and_aborts(llm: Any) -> Any:
    """Requests that come every third step; two go in the middle of their decoding."""
    requests = prompts(10, 60)
    arrivals = {
        3 * i: [(request, greedy(max_tokens=60))]
        for i, request in enumerate(requests)
    }
    finished = run_arrivals(llm, arrivals, {8: "arrival-2", 17: "arrival-4"})
    assert len(finished) == 8
    return finished


def request_switch(llm: Any) -> Any:
    """Requests that opt out of drafting beside others that do not."""
    params = [greedy(extra_args={"ppd_draft": i % 2 == 0}) for i in range(8)]
    return generate(llm, prompts(8), params)


CASES: dict[str, Callable[[Any], Any]] = {
    case.__name__: case
    for case in (
        batch_1,
        batch_16,
        mixed_lengths,
        more_than_fit,
        token_limits,
        model_length,
        stop_token_and_eos,
        stop_strings,
        structured_output,
        penalties,
        logprobs,
        arrivals_and_aborts,
        request_switch,
    )
}

LOOKUP = {"prompt_lookup_min": 1, "adaptive": True}
CLASSIFIERS = ("early", {"head": "classifier", "exit_layers": (4,)})
HAND_MADE = ("hand-made", {"exit_layers": (4,), "noise": 0.05})
# CP heads of experts without a condition, of a state that reads the drafts, and whole
# classifiers.
PLAIN = ("cp", {"rank": 3, "condition": "none"})
RECURRENT = (
    "cp",
    {
        "rank": 3,
        "condition": "recurrent",
        "expert_rank": 4,
    },
)
WHOLE = (
    "cp",
    {
        "rank": 2,
        "factorized": False,
        "condition": "none",
    },
)
DYNAMO = {
    "method": "dynamo",
    "eps_b": 0.1,
    "heads": ("dynamo", {}),
}
# Every case must hold for each of them. "heads" names what is filled in as the model: a kind of
# heads and how they are made.
MIDDLE = {"method": "early", "exit_layer": 3}
VARIANTS: dict[str, dict[str, Any]] = {
    "middle": MIDDLE,
    # Under tensor parallelism gamma needs all of values, token IDs and probabilities.
    "heads": {
        "method": "early",
        "num_speculative_tokens": 2,
        "gamma": 0.03,
        "heads": HAND_MADE,
    },
    "classifiers": {
        "method": "early",
        "exit_layer": 4,
        "gamma": 0.02,
        "heads": CLASSIFIERS,
    },
    "early-short": {
        "method": "early",
        "exit_layer": 4,
        "draft_vocab_size": 100,
        "heads": ("early", {"exit_layers": (4,), "train_vocab_size": 150}),
    },
    "classifiers-short": {
        "method": "early",
        "exit_layer": 4,
        "gamma": 0.02,
        "draft_vocab_size": 60,
        "heads": CLASSIFIERS,
    },
    "last": {
        "method": "early",
        "exit_layer": 5,
        "num_speculative_tokens": 7,
        "draft_sample_method": "greedy",
    },
    "exits": {
        "method": "early",
        "exit_layer": [2, 4],
        "adaptive": True,
    },
    "cp": {"method": "cp", "heads": PLAIN},
    "cp-recurrent": {"method": "cp", "heads": RECURRENT},
    "cp-layers": {
        "method": "cp",
        "heads": ("cp", {**RECURRENT[1], "layers": (1, 3)}),
    },
    "cp-recurrent-longer": {
        "method": "cp",
        "num_speculative_tokens": 5,
        "draft_vocab_size": 100,
        "heads": RECURRENT,
    },
    "cp-full": {
        "method": "cp",
        "num_speculative_tokens": 2,
        "heads": WHOLE,
    },
    "cp-full-short": {
        "method": "cp",
        "draft_vocab_size": 60,
        "heads": WHOLE,
    },
    "dynamo-short": {**DYNAMO, "draft_vocab_size": 100},
    "dynamo": DYNAMO,
    "dynamo-2": {
        **DYNAMO,
        "num_speculative_tokens": 1,
        "eps_b": 0.0,
        "heads": ("dynamo", {"mask_entries": 0}),
    },
    "lookup": MIDDLE | {"prompt_lookup_min": 1},
    "lookup-alone": {"method": "lookup", "prompt_lookup_min": 1},
    "cp-lookup": {
        "method": "cp",
        **LOOKUP,
        "heads": PLAIN,
    },
    "dynamo-lookup": DYNAMO | LOOKUP,
    "recurrent": {
        "method": "recurrent",
        "heads": ("recurrent", {"tie_weights": False}),
    },
    "recurrent-7": {
        "method": "recurrent",
        "num_speculative_tokens": 7,
        "heads": ("recurrent", {}),
    },
    "lookup-7": {
        "method": "lookup",
        "num_speculative_tokens": 7,
        "prompt_lookup_min": 1,
    },
    "recurrent-short": {
        "method": "recurrent",
        "num_speculative_tokens": 5,
        "draft_vocab_size": 100,
        "heads": ("recurrent", {}),
    },
}

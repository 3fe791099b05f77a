# SPDX-License-Identifier: Apache-2.0
"""Options and requests damaged at random by rules: each is taken as it was meant, or refused in one short line."""

import json
import random
import string
from collections.abc import Callable
from typing import Any

import pytest
from cases import greedy, prompts
from conftest import Factory
from vllm import EngineArgs
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from vllm_ppd.vllm_plugins import register
from vllm_ppd.vllm_plugins.config import activation
from vllm_ppd.vllm_plugins.config.options import DraftingOptions, OptionError
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.registry import METHODS

pytestmark = pytest.mark.usefixtures("bounded")
register()
LONGEST = 300
DICTIONARIES, BATCHES = 3000, 25

FITTING: dict[str, list[Any]] = {
    "num_speculative_tokens": [1, 4, 16], "exit_layer": [2, "3", ["5"]], "gamma": [0, 0.3],
    "adaptive": [True, False], "prompt_lookup_min": [2, 32],
    "disable_by_batch_size": [9], "draft_sample_method": ["greedy"],
}  # fmt: skip


def single_line(error: BaseException) -> str:
    text = str(error)
    assert len(text) <= LONGEST and "\n" not in text, text[:1000]
    return text


def damaged(rng: random.Random, name: str) -> str:
    """A name with one thing wrong, or only spelt otherwise."""
    at = rng.randrange(len(name))
    return rng.choice([
        name.upper(), name.replace("_", "-"), name.replace("_", ""), name[:at] + name[at + 1 :], name + "s",
        name[:at] + rng.choice(string.printable) + name[at:], " " + name, name * 1000, "", "\n", "\ud800" + name,
    ])  # fmt: skip


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """A value of any type that JSON or Python may hold: small and ordinary ones more often."""
    plain: list[Any] = [
        None, True, False, 0, 1, 2, 3, 5, 8, 16, -1, 2**31, 2**63, 10**30, 10**5000, 0.0, 0.5, 1.0, 3.0, 4.5, -0.5,
        1e308, float("nan"), float("inf"), "", "3", "0.5", "4,2", "true", "False", "ppd", "deferred", "greedy", "\n",
        "\x00\ud800",
        "é" * 10, "x" * 10**5, "2" * 5000, b"3", object(), 3 + 0j,
    ]  # fmt: skip
    if depth < 3 and rng.random() < 0.3:
        inner = [odd_value(rng, depth + 1) for _ in range(rng.choice([0, 1, 2, 3]))]
        return rng.choice([inner, tuple(inner), {str(i): value for i, value in enumerate(inner)}, inner * 200])
    return rng.choice(plain)


def options(rng: random.Random) -> Any:
    """A speculative_config: some options at their own or odd values, some names damaged."""
    if rng.random() < 0.02:
        return odd_value(rng)
    given: dict[Any, Any] = {"method": rng.choice(["ppd", "paradecode"])}
    for name in rng.sample(list(DraftingOptions.model_fields), rng.randrange(4)):
        given[name] = rng.choice(FITTING[name]) if name in FITTING and rng.random() < 0.7 else odd_value(rng)
        if name == "model" and isinstance(given[name], str):  # a name or a folder, not an option's type
            del given[name]
    for name in list(given):
        if rng.random() < 0.15:
            odd = rng.choice([None, 1, 2.5, True, b"gamma", ("gamma",)])
            given[damaged(rng, name) if rng.random() < 0.9 else odd] = given[name]
    return given


@pytest.fixture(scope="module")
def target(tiny_model: Factory) -> Any:
    return EngineArgs(
        model=str(tiny_model()), dtype="float32", kv_cache_memory_bytes=1 << 24
    ).create_engine_config()  # fmt: skip


@pytest.fixture
def activated(target: Any) -> Callable[[Any], DraftingConfig | None]:
    """What EngineArgs.create_speculative_config does with its arguments before vLLM reads them."""

    def activate(engine_args: Any) -> DraftingConfig | None:
        target.parallel_config.worker_cls = "auto"
        config = activation.activate(engine_args, target.model_config, target.parallel_config)
        if config is not None:
            assert "\n" not in config.summary()
            assert activation.active_config(engine_args) == config
            json.dumps(engine_args.speculative_config)
        return config

    return activate


def as_meant(given: Any, got: Any) -> bool:
    """Whether an option is what was given, type included."""
    if isinstance(got, tuple):  # exit layers
        layers = given if isinstance(given, list | tuple) else str(given).split(",")
        return got == tuple(sorted({int(layer) for layer in layers}))
    return given == got and (type(given) is type(got) or (type(given) is int and type(got) is float))


def test_dictionaries(tiny_model: Factory, activated: Factory) -> None:
    rng = random.Random(34)
    accepted = refused = 0
    args = EngineArgs(model=str(tiny_model()))
    for _ in range(DICTIONARIES):
        given = options(rng)
        args.speculative_config, args.additional_config = given, {}
        args.spec_method = args.spec_model = None
        args.spec_tokens = rng.choice([None] * 20 + [2])
        tokens = args.spec_tokens
        try:
            config = activated(args)
        except OptionError as error:
            single_line(error)
            refused += 1
            continue
        if config is None:
            assert not given or given.get("method") not in METHODS
            continue
        accepted += 1
        for name, value in given.items():
            got = getattr(config, name.replace("-", "_"))
            if name == "method" and got == "lookup":
                continue  # what ppd means without heads
            assert value is None or as_meant(value, got), (name, value, got)
        assert tokens in (None, config.num_speculative_tokens)
    assert accepted > DICTIONARIES // 10 and refused > DICTIONARIES // 4, (accepted, refused)


def body(rng: random.Random) -> dict[str, Any]:
    """A request with odd options of ours and odd sampling parameters."""
    given: dict[str, Any] = {"temperature": 0, "max_tokens": rng.choice([1, 2, 12]), "prompt": "x"}
    if rng.random() < 0.7:
        xargs: dict[str, Any] = {}
        for name in rng.sample(["ppd_draft", "ppd_eps_b", "session_id"], rng.randrange(1, 3)):
            fits = name == "ppd_draft" and rng.random() < 0.6
            value = rng.choice([0, 1, True, False, "true", "False"]) if fits else odd_value(rng)
            xargs[damaged(rng, name) if rng.random() < 0.2 else name] = value
        given["vllm_xargs"] = xargs if rng.random() < 0.95 else odd_value(rng)
    some = {
        "logprobs": [0, 3, 400, -1], "logprob_token_ids": [[5], [7, 7, 9], [], [999], list(range(200))], "n": [1, 2],
        "prompt_logprobs": [0, 2], "allowed_token_ids": [[9, 30, 44], [], [1000]], "bad_words": [["a", "b c"], [""]],
        "min_tokens": [1, 5], "repetition_penalty": [1.3, 0], "presence_penalty": [1.0], "frequency_penalty": [-2.0],
        "min_p": [0.5], "logit_bias": [{"5": 3.0}], "stop": ["a", ["e", "i"], ""], "top_k": [0, 5, -1],
        "top_p": [0.5, 0.0], "stop_token_ids": [[40, 50]], "seed": [3], "temperature": [1.0, 0.7, 5.0],
        "ignore_eos": [True], "skip_special_tokens": [False], "include_stop_str_in_output": [True],
        "thinking_token_budget": [3],
        "structured_outputs": [{"regex": "[a-f]{3}"}, {"choice": ["ab", "ac"]}, {"json": "{"}, {}],
        "repetition_detection": [{"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}],
    }  # fmt: skip
    for name in rng.sample(list(some), rng.randrange(4)):
        given[name] = rng.choice(some[name]) if rng.random() < 0.85 else odd_value(rng)
    return given


def parameters(given: dict[str, Any]) -> Any:
    """vLLM's SamplingParams of a request to /v1/completions, or None where vLLM refuses it before we see it."""
    try:
        request = CompletionRequest.model_validate(given)
    except Exception:  # stock vLLM answers structured_outputs=3 with HTTP 500
        return None
    try:
        return request.to_sampling_params(request.max_tokens or 12, {})
    except Exception as error:
        assert create_error_response(error).error.code == 400, repr(error)
        return None


@pytest.mark.engine
def test_requests(engine: Factory) -> None:
    """Each ends in an answer or in HTTP 400; those beside it are answered as by vLLM alone, and so is it if greedy."""
    rng = random.Random(36)
    llm, alone = engine({"method": "ppd", "exit_layer": 3}), engine()
    witnesses, witness = prompts(2, 60), greedy(12)
    expected = [list(output.outputs[0].token_ids) for output in alone.generate(witnesses, witness, use_tqdm=False)]
    answered = refused = 0

    def run(which: Any, requests: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
        nonlocal refused
        kept = set()
        for name, (prompt, params) in requests.items():
            try:
                which.llm_engine.add_request(name, prompt, params)
                kept.add(name)
            except Exception as error:
                answer = create_error_response(error).error
                assert answer.code == 400, repr(error)
                assert len(answer.message) <= LONGEST or "ppd" not in answer.message, answer.message[:1000]
                refused += which is llm
        done = {}
        while which.llm_engine.has_unfinished_requests():
            done |= {output.request_id: output for output in which.llm_engine.step() if output.finished}
        assert set(done) == kept
        return done

    for batch in range(BATCHES):
        odd = [params for params in (parameters(body(rng)) for _ in range(8)) if params is not None]
        plain = {f"{batch}-plain-{i}": (prompt, witness) for i, prompt in enumerate(witnesses)}
        asked = {f"{batch}-{i}": (prompts(8, 40)[i], params) for i, params in enumerate(odd)}
        done = run(llm, {**asked, **plain})
        assert [list(done[name].outputs[0].token_ids) for name in plain] == expected
        answered += len(done) - len(plain)
        exact = {name: asked[name] for name in asked if name in done and asked[name][1].temperature == 0}
        for name, output in run(alone, exact).items():
            ours, theirs = done[name].outputs[0], output.outputs[0]
            assert list(ours.token_ids) == list(theirs.token_ids), asked[name][1]
            assert len(ours.logprobs or ()) == len(theirs.logprobs or ()), asked[name][1]
    assert answered > BATCHES and refused > BATCHES, (answered, refused)

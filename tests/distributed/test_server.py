# SPDX-License-Identifier: Apache-2.0
"""A real server, started as a user would: completions, metrics, the start-up line, bad
requests, bad starts, and streams.

Streams of tool calls, reasoning, grammars and thinking budgets do not depend on drafts;
most are accepted.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import memorized
import pytest
from cases import SCHEMA, greedy
from conftest import Factory, keep_alive
from forkserver import Forkserver, write_output_to
from prometheus_client import REGISTRY
from server import Server
from vllm import LLM, envs
from vllm.entrypoints.cli import main as vllm_command
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.core_client import SyncMPClient

pytestmark = [pytest.mark.engine, pytest.mark.ranks]

DRAFTS = 7
ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": ARGUMENTS}}
]
PAIR = {"a": {"type": "integer"}, "b": {"type": "string"}}
ANSWER = {
    **SCHEMA,
    "properties": PAIR,
    "required": ["a", "b"],
}
JSON = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": ANSWER},
}


@pytest.fixture(scope="module")
def server(
    made_once: Factory, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = made_once("memorized", memorized.make)
    thinking = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    options = {
        "--speculative-model": str(folder / "heads"),
        "--spec-tokens": str(DRAFTS),
        "--ppd-adaptive": "false",
        "--tool-call-parser": "hermes",
        "--reasoning-parser": "deepseek_r1",
        "--reasoning-config": json.dumps(thinking),
        "--max-model-len": "512",
    }
    running = Server(
        folder / "model",
        tmp_path_factory.mktemp("server") / "log",
        "--enable-auto-tool-choice",
        *(word for option in options.items() for word in option),
    )
    yield running
    running.stop()


def grown(server: Server, before: dict[str, float]) -> dict[str, float]:
    """By how much each series of /metrics has grown."""
    return {
        name: value - before[name] for name, value in server.metrics().items()
    }


def test_completion_and_counters(server: Server) -> None:
    before = server.metrics()
    answer = server.complete(
        prompt=["def a(", "import os", "class B:"], logit_bias={"9": 0.1}
    ).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == [
        "length"
    ] * 3
    assert answer["usage"]["completion_tokens"] == 72
    change = grown(server, before)
    drafts, drafted, accepted, per_position = (
        change[f"vllm:spec_decode_num_{name}_total"]
        for name in (
            "drafts",
            "draft_tokens",
            "accepted_tokens",
            "accepted_tokens_per_pos",
        )
    )
    assert 0 < drafts <= drafted <= DRAFTS * drafts
    assert 0 < accepted == per_position <= drafted
    # A step that verifies drafts emits what it accepts and one token more; the first
    # token comes from the prompt. Two more steps of a request may be in flight when it
    # ends.
    assert accepted + drafts <= 72 - 3 + 2 * 3
    assert change["ppd:deferred_steps_total"] > 0
    assert change["ppd:fallback_steps_total"] > 0
    assert change["ppd:drafting_seconds_total"] > 0


def served_steps() -> float:
    """Of all engines of this process."""
    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "ppd:served_steps_total"
    )


def test_an_engine_process_chooses_by_step_costs(
    tiny_model: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads plugins while it makes the engine."""
    # vLLM keeps the environment's values once an engine has started.
    monkeypatch.setattr(
        envs, "VLLM_ENABLE_V1_MULTIPROCESSING", True, raising=False
    )
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(engine_utils, "get_mp_context", Forkserver)
    llm = LLM(
        str(tiny_model()),
        speculative_config={"method": "ppd"},
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        kv_cache_memory_bytes=1 << 26,
        disable_log_stats=False,
        max_num_seqs=4,
    )
    keep_alive(llm)
    assert isinstance(llm.llm_engine.engine_core, SyncMPClient)
    try:
        before = served_steps()
        llm.generate(["def main("], greedy(24), use_tqdm=False)
        assert served_steps() > before
        assert list((tmp_path / "vllm_ppd_step_costs").iterdir())
    finally:
        llm.llm_engine.engine_core.shutdown()


def test_request_switch(server: Server) -> None:
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    text = server.complete().json()["choices"][0]["text"]
    before = server.metrics()
    for value in (False, 0, "false"):
        plain = server.complete(vllm_xargs={"ppd_draft": value})
        assert plain.json()["choices"][0]["text"] == text
    assert grown(server, before)[accepted] == 0
    server.complete(vllm_xargs={"ppd_draft": True})
    assert grown(server, before)[accepted] > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["def", "import"]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "def"}]},
        ),
        ("/v1/responses", {"input": "def", "max_output_tokens": 4}),
    ],
)
def test_bad_options_are_refused_before_a_stream_begins(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    body = {
        "model": server.model,
        "max_tokens": 4,
        "stream": True,
        **body,
    }
    for options, expected in (
        (
            {"vllm_xargs": {"ppd_draft": "maybe"}},
            "vllm_xargs['ppd_draft']='maybe'",
        ),
        ({"vllm_xargs": {"ppd_drafts": 0}}, "did you mean 'ppd_draft'?"),
        ({"vllm_xargs": {"ppd_eps_b": 0.5}}, "vllm_xargs"),
        (
            {"vllm_xargs": {"ppd_num_drafts": DRAFTS + 1}},
            f"more than the {DRAFTS} drafts of this server",
        ),
        ({"vllm_xargs": {"ppd_draft": "x" * 10**6}}, "vllm_xargs"),
    ):
        answer = server.http.post(path, json={**body, **options})
        assert answer.status_code == 400, answer.text[:500]
        message = answer.json()["error"]["message"]
        assert expected in message and len(message) <= 300
    answer = server.http.post(
        path, json={**body, "vllm_xargs": {"ppd_draft": False}}
    )
    assert answer.status_code == 200
    assert "error" not in answer.text.replace('"error":null', ""), answer.text[
        :500
    ]


def test_streamed_and_aborted(server: Server) -> None:
    """A client that hangs up in mid-stream leaves the server serving."""
    body = {
        "model": server.model,
        "prompt": "for x in",
        "max_tokens": 200,
        "stream": True,
        "ignore_eos": True,
    }
    for _ in range(3):
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            next(stream.iter_lines())
    assert server.complete().status_code == 200
    deadline = time.monotonic() + 30
    while server.metrics()["vllm:num_requests_running"] > 0:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def run_vllm(words: list[str], log: Path) -> None:
    """`vllm` in a process of its own."""
    write_output_to(log)
    sys.argv = ["vllm", *words]
    try:
        vllm_command.main()
    except Exception as error:
        # As the interpreter ends a program
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def test_a_bad_start_ends_in_a_single_line(
    tiny_model: Factory, tmp_path: Path
) -> None:
    options = ["--speculative-model=ppd", "--ppd-exit-layer=9"]
    log = tmp_path / "log"
    process = Forkserver().Process(
        target=run_vllm, args=(["serve", str(tiny_model()), *options], log)
    )
    process.start()
    process.join(300)
    output = log.read_text()
    assert process.exitcode not in (None, 0)
    assert "Traceback" not in output, output
    assert "Loading" not in output
    line = (
        "vllm-ppd: error: exit_layer=9 is outside 1..5; this model has 6 layers"
    )
    assert output.strip().splitlines()[-1] == line


# Streams --------------------------------------------------------------------------


def streamed(server: Server, said: str, **body: Any) -> dict[str, Any]:
    """What the deltas of a streamed answer add up to."""
    request = {
        "model": server.model,
        "messages": [{"role": "user", "content": said}],
        "temperature": 0,
        "max_tokens": 160,
        "stream": True,
        "stream_options": {"include_usage": True},
        **body,
    }
    answer: dict[str, Any] = defaultdict(str)
    with server.http.stream(
        "POST", "/v1/chat/completions", json=request
    ) as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            answer["usage"] = event.get("usage") or answer["usage"]
            for choice in event["choices"]:
                delta = choice["delta"]
                answer["reasoning"] += delta.get("reasoning") or ""
                answer["content"] += delta.get("content") or ""
                answer["finish"] += choice["finish_reason"] or ""
                for call in delta.get("tool_calls") or ():
                    for part in ("name", "arguments"):
                        text = call["function"].get(part) or ""
                        answer[f"{part} {call['index']}"] += text
    # vLLM's parser keeps the token where a busy server streams it with the next one.
    answer["reasoning"] = answer["reasoning"].removeprefix("<think>")
    return answer


def same_with_drafts(server: Server, said: str, **body: Any) -> dict[str, Any]:
    """A streamed answer, which is the same without drafts."""
    answer = streamed(server, said, **body)
    assert answer == streamed(
        server, said, vllm_xargs={"ppd_draft": False}, **body
    )
    return answer


def with_most_drafts_accepted(
    server: Server, said: str, **body: Any
) -> dict[str, Any]:
    """The same, of which more than half of the drafts are accepted."""
    before = server.metrics()
    answer = same_with_drafts(server, said, **body)
    change = grown(server, before)
    accepted = change["vllm:spec_decode_num_accepted_tokens_total"]
    assert accepted > DRAFTS / 2 * change["vllm:spec_decode_num_drafts_total"]
    return answer


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        ("weather", [{"city": "Zürich", "days": 3}]),
        ("both", [{"city": "Rome"}, {"city": "Oslo"}]),
    ],
)
def test_tool_calls_after_reasoning(
    server: Server, said: str, calls: list[dict[str, Any]]
) -> None:
    answer = with_most_drafts_accepted(server, said, tools=TOOLS)
    for index, arguments in enumerate(calls):
        assert answer[f"name {index}"] == "weather"
        assert json.loads(answer[f"arguments {index}"]) == arguments
    assert f"name {len(calls)}" not in answer
    assert answer["reasoning"] and answer["finish"] == "tool_calls"


def test_text_after_reasoning(server: Server) -> None:
    """Its characters of two bytes are never cut."""
    answer = with_most_drafts_accepted(server, "story")
    assert answer["reasoning"] == "once upon a time"
    assert answer["content"] == "There was a café, and it was closed."


def test_a_grammar_holds_after_the_reasoning(server: Server) -> None:
    answer = with_most_drafts_accepted(
        server,
        "number",
        response_format=JSON,
    )
    assert answer["reasoning"] == "count them all first"
    assert json.loads(answer["content"]) == {"a": 127, "b": "none of them"}


@pytest.mark.parametrize(
    "grammar", [{}, {"response_format": JSON}], ids=["text", "grammar"]
)
def test_a_thinking_budget_ends_within_drafts(
    server: Server, grammar: dict[str, Any]
) -> None:
    """At every place among the drafts of a step."""

    def ask(budget: int) -> dict[str, Any]:
        limits = {"thinking_token_budget": budget, **grammar}
        return same_with_drafts(server, "number", **limits)

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(ask, range(3, 3 + DRAFTS + 1)))
    for answer in answers:
        assert "count them all first".startswith(answer["reasoning"])
        if grammar and answer["finish"] == "stop":
            assert set(json.loads(answer["content"])) == {"a", "b"}
    lengths = [len(answer["reasoning"]) for answer in answers]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] <= 3 + DRAFTS

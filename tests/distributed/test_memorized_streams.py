# SPDX-License-Identifier: Apache-2.0
"""Streams of tool calls, reasoning, grammars and thinking budgets do not depend on
drafts; most are accepted.
"""

import json
from collections.abc import Iterator
from typing import Any

import memorized
import pytest
from conftest import Factory
from server import Server

pytestmark = [pytest.mark.engine, pytest.mark.ranks]
DRAFTS = 7
ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": ARGUMENTS}}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(
    made_once: Factory, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = made_once("memorized", lambda folder: memorized.make(folder, DRAFTS))
    thinking = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    running = Server(
        folder / "model",
        tmp_path_factory.mktemp("server") / "log",
        *(
            "--speculative-model",
            str(folder / "heads"),
            "--spec-tokens",
            str(DRAFTS),
            "--ppd-adaptive",
            "false",
        ),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *(
            "--reasoning-parser",
            "deepseek_r1",
            "--reasoning-config",
            json.dumps(thinking),
        ),
        *("--max-model-len", "512"),
    )
    yield running
    running.stop()


def streamed(server: Server, said: str, **body: Any) -> dict[str, Any]:
    """What the deltas of a streamed answer add up to."""
    request = {
        "model": server.model,
        "messages": [{"role": "user", "content": said}],
        "temperature": 0,
        "max_tokens": 160,
    }
    request |= {"stream": True, "stream_options": {"include_usage": True}, **body}
    answer: dict[str, Any] = {
        "reasoning": "",
        "content": "",
        "calls": {},
        "finish": None,
        "usage": None,
    }
    with server.http.stream("POST", "/v1/chat/completions", json=request) as stream:
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
                answer["finish"] = choice["finish_reason"] or answer["finish"]
                for call in delta.get("tool_calls") or ():
                    made = answer["calls"].setdefault(
                        call["index"], {"name": "", "arguments": ""}
                    )
                    for part in made:
                        made[part] += call["function"].get(part) or ""
    return answer


def with_and_without_drafts(
    server: Server, said: str, **body: Any
) -> tuple[dict[str, Any], float]:
    """A streamed answer, the same with and without drafts, and accepted drafts a step."""
    expected = streamed(server, said, vllm_xargs={"ppd_draft": False}, **body)
    before = server.metrics()
    answer = streamed(server, said, **body)
    after = server.metrics()
    assert answer == expected
    drafts, accepted = (
        after[name] - before[name]
        for name in (
            "vllm:spec_decode_num_drafts_total",
            "vllm:spec_decode_num_accepted_tokens_total",
        )
    )
    return answer, accepted / drafts


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
    answer, accepted = with_and_without_drafts(server, said, tools=TOOLS)
    assert [json.loads(call["arguments"]) for call in answer["calls"].values()] == calls
    assert {call["name"] for call in answer["calls"].values()} == {"weather"}
    assert answer["reasoning"] and answer["finish"] == "tool_calls"
    assert accepted > DRAFTS / 2


def test_text_after_reasoning(server: Server) -> None:
    """Its characters of two bytes are never cut."""
    answer, accepted = with_and_without_drafts(server, "story")
    assert answer["reasoning"] == "once upon a time"
    assert answer["content"] == "There was a café, and it was closed."
    assert accepted > DRAFTS / 2


def test_a_grammar_holds_after_the_reasoning(server: Server) -> None:
    answer, accepted = with_and_without_drafts(server, "number", response_format=JSON)
    assert answer["reasoning"] == "count them all first"
    assert json.loads(answer["content"]) == {"a": 127, "b": "none of them"}
    assert accepted > DRAFTS / 2


@pytest.mark.parametrize(
    "grammar", [{}, {"response_format": JSON}], ids=["text", "grammar"]
)
def test_a_thinking_budget_ends_within_drafts(
    server: Server, grammar: dict[str, Any]
) -> None:
    """At every place among the drafts of a step."""
    lengths = []
    for budget in range(3, 3 + DRAFTS + 1):
        answer, _ = with_and_without_drafts(
            server, "number", thinking_token_budget=budget, **grammar
        )
        lengths.append(len(answer["reasoning"]))
        assert "count them all first".startswith(answer["reasoning"])
        if grammar and answer["finish"] == "stop":
            assert set(json.loads(answer["content"])) == {"a", "b"}
    assert lengths == sorted(set(lengths))
    assert lengths[-1] <= 3 + DRAFTS

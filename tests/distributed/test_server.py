# SPDX-License-Identifier: Apache-2.0
"""A real server, started as a user would: completions, metrics, the start-up line, bad
requests, bad starts.
"""

import importlib.metadata
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Factory
from server import LOGGED, VLLM, Server

pytestmark = [pytest.mark.engine, pytest.mark.ranks]


@pytest.fixture(scope="module")
def server(
    tiny_model: Factory, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = [
        "--speculative-model",
        "ppd",
        "--ppd-exit-layer",
        "4",
        "--spec-tokens",
        "2",
        "--ppd-adaptive",
        "false",
    ]
    options += [
        "--chat-template",
        "{% for message in messages %}{{ message.content }}{% endfor %}",
    ]
    running = Server(tiny_model(), log, *options)
    yield running
    running.stop()


def test_completion_and_counters(server: Server) -> None:
    before = server.metrics()
    answer = server.complete(prompt=["def a(", "import os", "class B:"]).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
    assert answer["usage"]["completion_tokens"] == 72
    after = server.metrics()
    change = {name: after[name] - before.get(name, 0.0) for name in after}
    drafts, drafted, accepted, per_position = (
        change[f"vllm:spec_decode_num_{name}_total"]
        for name in (
            "drafts",
            "draft_tokens",
            "accepted_tokens",
            "accepted_tokens_per_pos",
        )
    )
    assert 0 < drafts <= drafted <= 2 * drafts
    assert 0 < accepted == per_position <= drafted
    # A step that verifies drafts emits what it accepts and one token more; the first
    # token comes from the prompt. Two more steps of a request may be in flight when it
    # ends.
    assert accepted + drafts <= 72 - 3 + 2 * 3
    assert change["ppd:deferred_steps_total"] > 0
    assert change["ppd:fallback_steps_total"] > 0
    assert change["ppd:drafting_seconds_total"] > 0


def test_start_up_line(server: Server) -> None:
    lines = [
        line
        for line in server.log.read_text().splitlines()
        if "vllm-ppd: drafting" in line
    ]
    assert len(lines) == 1
    version = f"; vllm-ppd {importlib.metadata.version('vllm-ppd')}"
    for part in (
        "method ppd",
        "exit layer 4 of 6",
        "no heads",
        "2 drafts",
        "batch cut-off: none",
        version,
    ):
        assert part in lines[0]


def test_request_switch(server: Server) -> None:
    drafting = server.complete()
    before = server.metrics()["vllm:spec_decode_num_accepted_tokens_total"]
    for value in (False, 0, "false"):
        plain = server.complete(vllm_xargs={"ppd_draft": value})
        assert (
            plain.json()["choices"][0]["text"] == drafting.json()["choices"][0]["text"]
        )
    assert server.metrics()["vllm:spec_decode_num_accepted_tokens_total"] == before
    server.complete(vllm_xargs={"ppd_draft": True})
    assert server.metrics()["vllm:spec_decode_num_accepted_tokens_total"] > before


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"vllm_xargs": {"ppd_draft": "maybe"}},
            "vllm_xargs['ppd_draft']='maybe': Input should be a valid boolean",
        ),
        (
            {"vllm_xargs": {"ppd_drafts": False}},
            "vllm_xargs has no key 'ppd_drafts'; did you mean 'ppd_draft'?",
        ),
        ({"min_p": 0.2, "temperature": 1.0}, "min_p"),
        ({"prompt": "x" * 1000}, "maximum context length"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_bad_request_is_400_and_the_server_stays(
    server: Server, body: dict[str, Any], message: str
) -> None:
    answer = server.complete(**body)
    assert answer.status_code == 400
    assert message in answer.text
    assert server.complete(max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["def", "import"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "def"}]}),
        ("/v1/responses", {"input": "def", "max_output_tokens": 4}),
    ],
)
def test_bad_options_are_refused_before_a_stream_begins(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    body = {"model": server.model, "max_tokens": 4, "stream": True, **body}
    for xargs in (
        {"ppd_draft": "maybe"},
        {"PPD_DRAFT": 0},
        {"ppd_eps_b": 0.5},
        {"ppd_draft": "x" * 10**6},
    ):
        answer = server.http.post(path, json={**body, "vllm_xargs": xargs})
        assert answer.status_code == 400, answer.text[:500]
        assert "vllm_xargs" in answer.json()["error"]["message"]
        assert len(answer.json()["error"]["message"]) <= 300
    answer = server.http.post(path, json={**body, "vllm_xargs": {"ppd_draft": False}})
    assert answer.status_code == 200
    assert "error" not in answer.text.replace('"error":null', ""), answer.text[:500]


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


def refused(model: Path, *args: str) -> str:
    command = [*VLLM, "serve", str(model), "--dtype", "float32", *args]
    environment = {**os.environ, **LOGGED, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    run = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300
    )
    assert run.returncode != 0
    assert "Traceback" not in run.stderr, run.stderr[-2000:]
    assert "Loading" not in run.stderr + run.stdout
    return run.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            ["--speculative-model", "ppd", "--ppd-exit-layer", "9"],
            "vllm-ppd: error: exit_layer=9 is outside 1..5; this model has 6 layers",
        ),
        pytest.param(
            ["-sc", '{"method": "ppd", "model": "./no-heads"}'],
            "vllm-ppd: error: heads folder './no-heads' does not exist; give a "
            "folder with config.json, or omit",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_bad_start_ends_in_a_single_line(
    tiny_model: Factory, args: list[str], line: str
) -> None:
    assert refused(tiny_model(), *args) == line
